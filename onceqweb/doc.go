// Package onceqweb is a web page for onceq: queues, jobs, effects that wait for a person, schedules, and an audit trail. It is
// an http.Handler for any router, with nothing to build and nothing loaded from elsewhere.
//
//	page, err := onceqweb.New(q, pool, onceqweb.Config{
//		Title: "billing, production",
//		Viewer: func(r *http.Request) (onceqweb.Viewer, error) {
//			user, err := session(r) // the application's own
//			return onceqweb.Viewer{Name: user.Email, Act: user.OnCall, Payloads: user.Support}, err
//		},
//	})
//	mux.Handle("/admin/onceq/", http.StripPrefix("/admin/onceq", page))
//	server.RegisterOnShutdown(page.Close)
//
// Without [Config.Viewer] everybody who reaches the handler may read, and nobody may act or see payloads. Every action is a
// POST that must come from the page itself, and is written into the audit trail and the log.
//
// All pages work without script. With it they follow the database: open pages share one look at it every two seconds, however
// many they are. Each statement has a time limit, and none holds a lock that a worker waits for.
package onceqweb
