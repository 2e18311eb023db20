package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/user"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
)

// Exit codes. They are part of the command's interface: docs/run/operations.md lists them.
const (
	codeFailed      = 1   // the operation failed; the message says why
	codeUsage       = 2   // wrong arguments; nothing was sent
	codeNotFound    = 3   // no such job, key, effect or schedule
	codeRefused     = 4   // nobody said yes, or the state of things does not allow it
	codeSchema      = 5   // the tables are missing or of another version
	codeUnreachable = 6   // no connection to the database
	codeFindings    = 7   // doctor found something
	codeInterrupted = 130 // by ctrl-c or SIGTERM
)

var codeNames = map[int]string{
	codeFailed: "failed", codeUsage: "usage", codeNotFound: "not_found", codeRefused: "refused", codeSchema: "schema",
	codeUnreachable: "unreachable", codeFindings: "findings", codeInterrupted: "interrupted",
}

// exit is an error with an exit code. Its err is nil if everything was said already.
type exit struct {
	code int
	err  error
}

func (e *exit) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *exit) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &exit{codeUsage, fmt.Errorf(format, args...)}
}

// app is one call of the command.
type app struct {
	in          *os.File
	out, errOut io.Writer

	database, schema, who string
	json, wide            bool
	timeout               time.Duration
	conns                 int32 // of the pool; 0 means 2
	each                  bool  // limit each statement by itself, in a call that sends many

	names *regexp.Regexp // of commands, as advice has them

	pool *pgxpool.Pool
	q    *onceq.Queue
	ops  *onceqops.Ops
	ask  bool // a command is running: what fails is no mistake in the arguments
}

// The commands stand in the order in which somebody needs them.
func init() { cobra.EnableCommandSorting = false }

func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "onceq",
		Short: "See and mend the queues of onceq",
		Long: `onceq shows what is in the queues of a database, says what is wrong, and mends it.

It connects to --database, else to $DATABASE_URL, else as psql does: PGHOST, PGUSER, PGDATABASE and so on.
Begin with: onceq doctor`,
		SilenceUsage: true, SilenceErrors: true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			a.ask = true
			if a.timeout <= 0 {
				return usagef("--timeout is %v; it must be positive", a.timeout)
			}
			return nil
		},
		Version: version(),
	}
	root.SetVersionTemplate("onceq {{.Version}}\n")
	flags := root.PersistentFlags()
	flags.StringVarP(&a.database, "database", "d", "", "connection string, as a URL or as key=value; ps shows it to others on this machine (default $DATABASE_URL, else the PG* variables)")
	flags.StringVar(&a.schema, "schema", envOr("ONCEQ_SCHEMA", "onceq"), "schema of onceq's tables (also $ONCEQ_SCHEMA)")
	flags.BoolVar(&a.json, "json", false, "print JSON; errors too, on stderr")
	flags.BoolVar(&a.wide, "wide", false, "print columns whole, also where that is wider than the terminal")
	flags.DurationVar(&a.timeout, "timeout", 30*time.Second, "time limit of each statement; those of a long command count one by one")
	flags.StringVar(&a.who, "who", "", "who you are, for the audit trail (default $ONCEQ_WHO, else user@host)")
	root.AddGroup(&cobra.Group{ID: "look", Title: "Look:"}, &cobra.Group{ID: "mend", Title: "Look and mend:"}, &cobra.Group{ID: "set", Title: "Set up:"})
	for _, g := range []struct {
		id       string
		commands []*cobra.Command
	}{
		{"look", []*cobra.Command{a.doctorCommand(), a.queuesCommand(), a.statsCommand(), a.workersCommand(), a.topCommand(), a.uiCommand(), a.mcpCommand(), a.keysCommand(), a.pausesCommand(), a.actionsCommand(), a.payloadsCommand()}},
		{"mend", []*cobra.Command{a.jobsCommand(), a.effectsCommand(), a.lanesCommand(), a.limitsCommand(), a.groupsCommand(), a.schedulesCommand(), a.pauseCommand(), a.resumeCommand()}},
		{"set", []*cobra.Command{a.migrateCommand(), a.importCommand(), a.checkCommand(), a.reapCommand()}},
	} {
		for _, c := range g.commands {
			c.GroupID = g.id
			root.AddCommand(c)
		}
	}
	var names []string
	for _, c := range root.Commands() {
		names = append(names, c.Name())
	}
	a.names = regexp.MustCompile(`\bonceq (` + strings.Join(names, "|") + `)\b`)
	accepting(root)
	exemplify(root)
	a.completing(root)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usagef("%w; see: %s --help", err, c.CommandPath())
	})
	return root
}

// unasking are the commands that change something and do not ask.
var unasking = []string{
	"onceq lanes limit", "onceq limits set", "onceq limits remove", "onceq schedules fire", "onceq schedules pause", "onceq schedules resume",
	"onceq pause", "onceq resume", "onceq migrate up", "onceq reap",
}

// accepting lets them take --yes, so that whoever adds it everywhere is never refused.
func accepting(c *cobra.Command) {
	if slices.Contains(unasking, c.CommandPath()) {
		c.Flags().BoolP("yes", "y", false, "accepted, as wherever something changes; this one does not ask")
	}
	for _, below := range c.Commands() {
		accepting(below)
	}
}

// group is a command that only has others below it. An unknown one is an error, which cobra would answer with the help alone.
func group(use, short string, below ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usagef("unknown command %q; see: %s --help", args[0], c.CommandPath())
		}
		return nil
	}, RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	c.AddCommand(below...)
	return c
}

func envOr(name, other string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return other
}

// person is who does this, for the audit trail.
func (a *app) person() string {
	if a.who != "" {
		return a.who
	}
	if who := os.Getenv("ONCEQ_WHO"); who != "" {
		return who
	}
	who := "unknown"
	if u, err := user.Current(); err == nil {
		who = u.Username
	}
	if host, err := os.Hostname(); err == nil {
		who += "@" + host
	}
	return who
}

// config is how to connect.
func (a *app) config() (*pgxpool.Config, error) {
	to := a.database
	if to == "" {
		to = os.Getenv("DATABASE_URL")
	}
	config, err := pgxpool.ParseConfig(to)
	switch {
	case atOutside(to):
		err = errAt
	case err == nil && oddName(config.ConnConfig.RuntimeParams):
		err = errOdd
	}
	if err != nil {
		return nil, unreadable(err)
	}
	// One for the command, one for what it asks beside that. Unnamed statements work through every pooler.
	config.MaxConns, config.MinConns, config.MinIdleConns = cmp.Or(a.conns, 2), 0, 0
	c := config.ConnConfig
	if c.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement {
		c.DefaultQueryExecMode = pgx.QueryExecModeExec
	}
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = "onceq"
	}
	if c.ConnectTimeout == 0 || c.ConnectTimeout > a.timeout {
		c.ConnectTimeout = a.timeout
	}
	if a.each {
		c.Tracer = eachLimited(a.timeout)
	}
	// When a context ends, the server is asked to stop the statement, which would otherwise go on there.
	c.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: 5 * time.Second}
	}
	return config, nil
}

// errAt is of a URL whose user and password are cut short by a character that ends them. Of user:12/34@host, 12 would be the port, and the
// rest of the password the database's name; of user:12@34@host, the server would be 34@host.
var errAt = errors.New("failed to parse as URL")

// errOdd is of a text that is no URL to pgx, because of a space or a quote before it, and for that reason key=value with all before the
// first = as a key. The server repeats a key that it does not know, and with it the password.
var errOdd = errors.New("neither a URL nor key=value")

// oddName reports whether a parameter has a name that none of Postgres has.
func oddName(parameters map[string]string) bool {
	for name := range parameters {
		if strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '_' && r != '.' }) {
			return true
		}
	}
	return false
}

// atOutside reports whether an @ of a URL stands where only that of a password does: for pgx the first one ends the user and the password, if
// it comes before a slash. Of the parameters these three may have one.
func atOutside(to string) bool {
	_, rest, _ := strings.Cut(to, "://")
	if !strings.HasPrefix(to, "postgres://") && !strings.HasPrefix(to, "postgresql://") {
		return false
	}
	if i := strings.IndexAny(rest, "@/"); i >= 0 && rest[i] == '@' {
		if strings.ContainsAny(rest[:i], "?#") { // which other programs take for the end of the server
			return true
		}
		rest = rest[i+1:]
	}
	path, query, _ := strings.Cut(rest, "?")
	for parameter := range strings.SplitSeq(query, "&") {
		switch name, _, _ := strings.Cut(parameter, "="); name {
		case "user", "password", "application_name":
		default:
			path += parameter
		}
	}
	return strings.Contains(path, "@")
}

// unreadable says why a connection string cannot be read, and repeats nothing of it: it has a password, and what cannot be read does not say
// where. The reason that pgx gives for a malformed one may quote a part of the password.
func unreadable(err error) error {
	reason := err.Error()
	if i := strings.LastIndex(reason, "`: "); i >= 0 { // pgx repeats the string before it
		reason = reason[i+3:]
	}
	switch {
	case err == errOdd:
		reason = "a URL begins with postgres:// or postgresql://, without a space or a quote before it; names of key=value have letters, digits and _"
	case strings.Contains(reason, "failed to parse as keyword/value"):
		reason = `as key=value it is malformed. A value with a space stands in quotes, as in password='a b'; there, write \' for ' and \\ for \`
	case strings.Contains(reason, "failed to parse as URL"):
		reason = "as a URL it is malformed. In a password, write %40 for @, %3A for :, %2F for /, %3F for ?, %23 for # and %25 for %; or use key=value: host=db user=me password='…'"
	}
	return &exit{codeUsage, errors.New("the connection string cannot be read: " + reason)}
}

// connect opens the pool. With checked, it also finds out whether the tables are those that this command knows.
func (a *app) connect(ctx context.Context, checked bool) error {
	config, err := a.config()
	if err != nil {
		return err
	}
	if a.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	if err := a.pool.Ping(ctx); err != nil {
		if errors.Is(ctx.Err(), context.Canceled) {
			return err // ctrl-c
		}
		return a.unreachable(config.ConnConfig, err)
	}
	if a.q, err = onceq.New(a.pool, &onceq.Config{Schema: a.schema, Logger: slog.New(slog.DiscardHandler)}); err != nil {
		return &exit{codeUsage, err}
	}
	a.ops = onceqops.New(a.q)
	if checked {
		var schema *onceq.SchemaError
		if err := a.q.Check(ctx); errors.As(err, &schema) || errors.Is(err, context.DeadlineExceeded) || state(err) != "" {
			return err
		}
	}
	return nil
}

func (a *app) close() {
	if a.pool != nil {
		a.pool.Close()
	}
}

// unreachable says in words why there is no connection, and where the command looked for the server.
func (a *app) unreachable(to *pgx.ConnConfig, err error) error {
	source := "--database"
	switch {
	case a.database != "":
	case os.Getenv("DATABASE_URL") != "":
		source = "DATABASE_URL"
	default:
		source = "the PG* variables and psql's defaults, because neither --database nor DATABASE_URL is set"
	}
	why, advice := err.Error(), "check that the server is up and that this machine reaches it"
	var pgErr *pgconn.PgError
	var connErr *pgconn.ConnectError
	switch {
	case errors.As(err, &pgErr):
		why = pgErr.Message
		switch pgErr.Code {
		case "28P01", "28000":
			advice = "check the user, the password and pg_hba.conf"
		case "3D000":
			advice = "check the name of the database"
		case "53300":
			advice = "all connections are in use: end some, or raise max_connections"
		case "57P03":
			advice = "wait until the server has started"
		}
	case errors.Is(err, context.DeadlineExceeded):
		why = fmt.Sprintf("no answer within %v", a.timeout)
	case errors.As(err, &connErr):
		// One line for each way that was tried: with TLS and without, and for each address.
		lines := strings.Split(strings.TrimSpace(connErr.Unwrap().Error()), "\n")
		for i, l := range lines {
			lines[i] = strings.TrimSpace(l)
		}
		why = strings.Join(slices.Compact(lines), "; ")
	}
	return &exit{codeUnreachable, fmt.Errorf("cannot connect to database %q as user %q at %s:%d: %s\nThis address is from %s; %s",
		to.Database, to.User, to.Host, to.Port, why, source, advice)}
}

// eachLimited gives each statement that is sent, or each batch, a time limit. A statement's context is the one that its tracer returns.
type eachLimited time.Duration

type endOfLimit struct{}

func (l eachLimited) begin(ctx context.Context) context.Context {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(l))
	return context.WithValue(ctx, endOfLimit{}, cancel)
}

func (eachLimited) end(ctx context.Context) { ctx.Value(endOfLimit{}).(context.CancelFunc)() }

// TraceQueryStart is called before a statement.
func (l eachLimited) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return l.begin(ctx)
}

// TraceQueryEnd is called after it.
func (l eachLimited) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	l.end(ctx)
}

// TraceBatchStart is called before a batch.
func (l eachLimited) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return l.begin(ctx)
}

// TraceBatchQuery is called for each statement of it.
func (eachLimited) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd is called after it.
func (l eachLimited) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchEndData) {
	l.end(ctx)
}

// state is the SQLSTATE of an error, or "".
func state(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// limited gives a context for one statement.
func (a *app) limited(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, a.timeout)
}

// exactly names the table that is missing, where an error takes it for all of them.
func (a *app) exactly(err error) error {
	var schema *onceq.SchemaError
	if a.q == nil || !errors.As(err, &schema) || schema.Found > 0 {
		return err
	}
	ctx, cancel := a.limited(context.Background())
	defer cancel()
	if now := a.intact(ctx); errors.As(now, new(*missingTables)) {
		return now
	}
	return err
}

// report prints an error and returns the exit code.
func (a *app) report(err error) int {
	if err == nil {
		return 0
	}
	err = a.exactly(err)
	code, advice := a.code(err)
	text := strings.TrimPrefix(strings.TrimPrefix(err.Error(), "onceq: "), "onceqcron: ")
	var schema *onceq.SchemaError
	if errors.As(err, &schema) && schema.Found < schema.Want {
		if text = fmt.Sprintf("schema %q is at version %d, and this command needs %d", schema.Schema, schema.Found, schema.Want); schema.Found == 0 {
			text = fmt.Sprintf("schema %q has no onceq tables", schema.Schema)
		}
	}
	if advice != "" {
		text += "\n" + advice
	}
	if text == "" {
		return code
	}
	text = a.typed(text)
	if a.json {
		_ = writeJSON(a.errOut, map[string]any{"error": text, "code": codeNames[code]}, "")
		return code
	}
	a.remark("onceq: %s\n", a.wrapped(a.errOut, text, 7))
	return code
}

// code gives the exit code for an error, and what to do if the error does not say it.
func (a *app) code(err error) (code int, advice string) {
	var e *exit
	var schema *onceq.SchemaError
	var gone *missingTables
	var invalid *onceq.InvalidError
	var owner *onceqcron.OwnerError
	var connErr *pgconn.ConnectError
	switch {
	case errors.As(err, &e):
		return e.code, ""
	case errors.As(err, &gone):
		return codeSchema, capital(gone.advice()) + "."
	case errors.As(err, &schema):
		if schema.Found < schema.Want {
			return codeSchema, "To create or update them: onceq migrate up. If they are in another schema, name it with --schema."
		}
		return codeSchema, "This is about the onceq command too: install the version of the command that the workers use."
	case !a.ask:
		return codeUsage, "See: onceq --help"
	case errors.Is(err, onceq.ErrNotFound), errors.Is(err, onceqcron.ErrNotFound):
		return codeNotFound, ""
	case errors.As(err, &invalid):
		return codeUsage, ""
	case errors.Is(err, onceq.ErrHeld), errors.Is(err, onceq.ErrDuplicate), errors.Is(err, onceqops.ErrUnfinished), errors.As(err, &owner):
		return codeRefused, ""
	case state(err) == "42501":
		return codeFailed, "The role lacks a right. As the owner of the tables: onceq migrate grants ROLE | psql"
	case state(err) == "57014", errors.Is(err, context.DeadlineExceeded):
		return codeFailed, fmt.Sprintf("A statement took longer than --timeout %v and was stopped; nothing of it remains. Look for locks with: onceq doctor", a.timeout)
	case errors.As(err, &connErr), pgconn.SafeToRetry(err), strings.HasPrefix(state(err), "57P"), strings.HasPrefix(state(err), "08"), errors.Is(err, io.ErrUnexpectedEOF):
		return codeUnreachable, "The connection was lost. If this was a change, look first whether it happened."
	}
	return codeFailed, ""
}

// typed gives a text whose commands can be typed as they are: they look at the schema that this call looks at.
func (a *app) typed(text string) string {
	const usual = "onceq"
	if a.schema == usual && envOr("ONCEQ_SCHEMA", usual) == usual {
		return text
	}
	return a.names.ReplaceAllStringFunc(text, func(command string) string {
		return "onceq --schema " + quoteArg(a.schema) + strings.TrimPrefix(command, "onceq")
	})
}

// quoteArg quotes an argument for a shell if it needs that. What a terminal would obey is written as bash, ksh and zsh read it.
func quoteArg(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") == "" {
		return s
	}
	if !strings.ContainsFunc(s, dangerous) {
		return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
	}
	var b strings.Builder
	b.WriteString("$'")
	for i := range len(s) {
		switch c := s[i]; {
		case c == '\'' || c == '\\':
			b.WriteString(`\` + string(c))
		case c < ' ' || c > '~':
			b.WriteString(fmt.Sprintf(`\x%02x`, c))
		default:
			b.WriteByte(c)
		}
	}
	return b.String() + "'"
}

// inTx runs fn in a transaction whatever the database's defaults are. What a person does and its line in the audit trail commit
// together there. Should this process freeze in between, the server ends it.
func (a *app) inTx(ctx context.Context, fn func(tx pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, a.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `select pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true)`); err != nil {
			return err
		}
		return fn(tx)
	})
}

// begins adds a line to the audit trail about a change that takes many statements. Without it nothing is to be changed.
func (a *app) begins(ctx context.Context, action onceqops.Action) error {
	ctx, cancel := a.limited(context.WithoutCancel(ctx))
	defer cancel()
	action.Who, action.Outcome = a.person(), "begins"
	_, err := a.ops.RecordAction(ctx, a.pool, action)
	return err
}

// ended adds what became of it. If that fails, it says so, and what has happened stays.
func (a *app) ended(ctx context.Context, action onceqops.Action, said string, stopped bool, err error) {
	ctx, cancel := a.limited(context.WithoutCancel(ctx))
	defer cancel()
	if stopped {
		said += "; interrupted"
	}
	if code, _ := a.code(err); code == codeUnreachable { // its text names hosts, and more people read the trail than use this command
		said += "; the connection was lost"
	} else if err != nil {
		said += "; " + err.Error()
	}
	action.Who, action.Outcome = a.person(), strings.ToValidUTF8(said[:min(len(said), 4000)], "")
	if _, err := a.ops.RecordAction(ctx, a.pool, action); err != nil {
		a.remark("onceq: the audit trail does not say what became of this: %s\n", err)
	}
}
