package pgserver

// WithDatabase is withDatabase, for its table of connection strings.
func WithDatabase(connString, database string) string { return withDatabase(connString, database) }
