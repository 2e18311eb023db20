package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// site is the page of a task: what the agent does now, what it wants to do, and two buttons. Put your log-in in front of it.
func site(q *onceq.Queue, pool *pgxpool.Pool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{task}", func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, page) })
	mux.HandleFunc("POST /{task}/{turn}", func(w http.ResponseWriter, r *http.Request) {
		step := r.PathValue("task") + "/" + r.PathValue("turn")
		if _, err := q.Emit(r.Context(), pool, "approval", step, r.FormValue("yes") == "true"); err != nil { // the first press counts
			http.Error(w, "try again", http.StatusServiceUnavailable)
			return
		}
		http.Redirect(w, r, "/"+r.PathValue("task"), http.StatusSeeOther)
	})
	mux.HandleFunc("GET /{task}/events", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for last := ""; r.Context().Err() == nil; time.Sleep(200 * time.Millisecond) {
			now, err := look(r.Context(), q, pool, r.PathValue("task"))
			if err != nil {
				return // the browser connects again
			}
			text, _ := json.Marshal(now)
			if string(text) != last {
				_, _ = fmt.Fprintf(w, "data: %s\n\n", text)
				_ = http.NewResponseController(w).Flush()
			}
			if last = string(text); now.State.Finished() {
				return
			}
		}
	})
	return http.NewCrossOriginProtection().Handler(mux) // another site cannot press the button
}

// view is what the page shows.
type view struct {
	State  onceq.State     `json:"state"`
	Now    string          `json:"now"`   // what the handler has said
	Turn   string          `json:"turn"`  // of what a person is to approve; empty for nothing
	Wants  answer          `json:"wants"` // that
	Answer json.RawMessage `json:"answer"`
}

// look reads what a person is to approve where it is recorded: just that will be done.
func look(ctx context.Context, q *onceq.Queue, pool *pgxpool.Pool, id string) (v view, err error) {
	job, err := q.GetByKey(ctx, pool, agent.Name, id)
	if v = (view{State: job.State, Answer: job.Result}); job.Progress != nil {
		v.Now = job.Progress.Note
	}
	if err != nil || job.State != onceq.StateDelayed {
		return v, err
	}
	ops := onceqops.New(q)
	why, err := ops.Explain(ctx, pool, job.ID)
	if err != nil || why.Cause() != onceqops.CauseEvent {
		return v, err
	}
	effects, err := ops.Effects(ctx, pool, job.ID)
	for _, e := range effects {
		if turn := strings.TrimPrefix(why.Reasons[0].Key, id+"/"); e.Name == "model/"+turn {
			v.Turn, err = turn, json.Unmarshal(e.Result, &v.Wants)
		}
	}
	return v, err
}

const page = `<!doctype html><p id=now>…</p>
<form method=post><button name=yes value=true>Approve</button> <button name=yes value=false>Refuse</button></form>
<script>
const events = new EventSource(location.pathname + "/events")
events.onmessage = e => {
	const v = JSON.parse(e.data), form = document.forms[0]
	form.hidden = !v.turn
	form.action = location.pathname + "/" + v.turn
	document.getElementById("now").textContent = v.turn ? "May it " + v.wants.tool + " " + v.wants.text + "?" : v.answer || v.now || v.state
	if (["completed", "dead", "cancelled", "held"].includes(v.state)) events.close()
}
</script>`
