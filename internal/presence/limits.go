package presence

import (
	"context"
	"log/slog"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
)

// Limits are the limits of a run's jobs: it says once of each that nobody has set it, which is rarely meant.
type Limits struct {
	First func() // called for the first one; nil for nothing

	mu   sync.Mutex      // guards the others, for no longer than a map takes
	all  map[string]bool // at most 1,000: what is met after so many is in Health alone
	news []string        // of which the database was not asked yet
}

// Meet takes the limit of a job. Anybody may call it.
func (m *Limits) Meet(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.all[name] || len(m.all) >= 1000:
		return
	case m.all == nil:
		if m.all = make(map[string]bool); m.First != nil {
			m.First()
		}
	}
	m.all[name] = true
	m.news = append(m.news, name)
}

// Ask asks which of those that are new nobody has set, and says so.
func (m *Limits) Ask(ctx context.Context, store *pg.Store, db pg.DB, log *slog.Logger) error {
	m.mu.Lock()
	names := m.news
	m.news = nil
	m.mu.Unlock()
	if len(names) == 0 {
		return nil
	}
	var unset []string
	err := store.Send(ctx, db, pg.Hot, stmt.LimitsUnset, []any{names}, pg.Each(func(rows pgx.Rows) error {
		var name string
		err := rows.Scan(&name)
		unset = append(unset, name)
		return err
	}))
	if err != nil {
		m.mu.Lock()
		m.news = append(m.news, names...)
		m.mu.Unlock()
		return err
	}
	for _, name := range unset {
		log.Warn("onceq: nobody has set a limit that jobs name, so one of them runs at a time; set it "+
			"with SetLimit or onceq limits set, or correct its name", slog.String("limit", name))
	}
	return nil
}
