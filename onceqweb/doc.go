// Package onceqweb is a web page for onceq: queues, jobs, effects that wait for a person, schedules, and an audit trail. It is
// an http.Handler for any router, with nothing to build and nothing loaded from elsewhere.
//
//	page, err := onceqweb.New(q, pool, onceqweb.Config{
//		Title: "billing, production",
//		Viewer: func(r *http.Request) (onceqweb.Viewer, error) {
//			user, err := session(r) // the application's own; an error refuses the request
//			return onceqweb.Viewer{Name: user.Email, Payloads: user.Support, Run: user.OnCall, Change: user.OnCall, Decide: user.Lead}, err
//		},
//	})
//	mux.Handle("/admin/onceq/", http.StripPrefix("/admin/onceq", page))
//	server.RegisterOnShutdown(page.Close)
//
// [Config.Viewer] is required: it says who makes a request and what they may do. [Everybody] is one that lets everybody read who
// reaches the handler. Every action is a POST that must come from the page itself, and is written into the audit trail and the
// log, also if it is refused.
//
// All pages work without script. With it they follow the database: open pages share one look at it every two seconds, however
// many they are. Each statement has a time limit, and none holds a lock that a worker waits for.
package onceqweb
