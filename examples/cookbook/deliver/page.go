package main

import (
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"strconv"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// page lists the latest deliveries to an endpoint, and sends one again. Put your log-in in front of it, which decides whose
// endpoint it is.
func page(q *onceq.Queue, pool *pgxpool.Pool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /endpoints/{endpoint}", func(w http.ResponseWriter, r *http.Request) {
		jobs, err := onceqops.New(q).List(r.Context(), pool, onceqops.Filter{Kind: deliver.Name, Scope: "endpoint/" + r.PathValue("endpoint")})
		if err != nil {
			http.Error(w, "try again", http.StatusServiceUnavailable)
			return
		}
		_ = list.Execute(w, jobs)
	})
	mux.HandleFunc("POST /endpoints/{endpoint}/{job}", func(w http.ResponseWriter, r *http.Request) {
		id, _ := strconv.ParseInt(r.PathValue("job"), 10, 64)
		job, err := q.Get(r.Context(), pool, id)
		if err != nil || job.Kind != deliver.Name || job.Scope != "endpoint/"+r.PathValue("endpoint") {
			http.NotFound(w, r)
			return
		}
		switch job.State {
		case onceq.StateCompleted:
			var d delivery
			if err = json.Unmarshal(job.Payload, &d); err == nil {
				again := deliver.Job(d)
				again.Key = fmt.Sprintf("%s again after %d", d.Event, id) // a second press of the button is a duplicate
				_, err = q.Enqueue(r.Context(), pool, again)
			}
		case onceq.StateDead:
			_, err = onceqops.New(q).Redrive(r.Context(), pool, id)
		default:
			_, err = onceqops.New(q).Retry(r.Context(), pool, id) // now, and not when its pause is over
		}
		if err != nil {
			http.Error(w, "try again", http.StatusServiceUnavailable)
			return
		}
		http.Redirect(w, r, "/endpoints/"+r.PathValue("endpoint"), http.StatusSeeOther)
	})
	return http.NewCrossOriginProtection().Handler(mux)
}

var list = template.Must(template.New("").Parse(`<!doctype html><title>Deliveries</title>
<table><tr><th>event<th>state<th>failed<th>next attempt<th>errors<th>
{{range .}}<tr><td>{{.Key}}<td>{{.State}}<td>{{.Attempts}}<td>{{if not .State.Finished}}{{.RunAt.UTC.Format "2006-01-02 15:04:05"}}{{end}}
<td>{{range .Errors}}<div>{{.Error}}</div>{{end}}
<td><form method=post action="/endpoints/{{slice .Scope 9}}/{{.ID}}"><button>Send again</button></form>
{{end}}</table>`))
