package pgserver

// WithDatabase is withDatabase, for its table of connection strings.
func WithDatabase(connString, database string) string { return withDatabase(connString, database) }

// WithoutPool is withoutPool, for what it must not change.
func WithoutPool(connString string) string { return withoutPool(connString) }
