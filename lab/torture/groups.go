package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

// A group is a job of formJoin, which waits for jobs of formPart. Its name decides how many there are, what a dead one means and
// how it is made. It may wait for parts of older groups too. Some parts add others, and somebody redrives the dead ones.

// joinBound is how long a job may still wait when all others are done, whatever the faults do meanwhile.
const joinBound = time.Minute

// shape says how a group is made.
type shape struct {
	parts int
	rule  onceq.DeadRule
	how   int // by EnqueueGroup, after ids, or after keys in one call
}

const (
	byGroup = iota
	byID
	byKey
)

func hashOf(name string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	return int(h.Sum32())
}

func (w work) shape() shape {
	n := hashOf(w.Name)
	s := shape{parts: 1 + n%10, rule: onceq.DeadRule(n / 16 % 3), how: n / 64 % 3}
	if n%16 == 0 {
		s.parts = 50
	}
	return s
}

// partsOf is how the names of the parts begin that are enqueued with a group.
func partsOf(join string) string { return formPart + strings.TrimPrefix(join, formJoin) + "/" }

// members returns the parts that are enqueued with a group.
func (w work) members() []work {
	all := make([]work, w.shape().parts)
	for i := range all {
		all[i] = work{Name: fmt.Sprint(partsOf(w.Name), i), Form: formPart, Keyed: w.Keyed}
	}
	return all
}

// added returns the parts that a part adds to its groups. Those add none.
func (w work) added() []work {
	n := hashOf(w.Name)
	if strings.Contains(w.Name, "+") || n%4 > 0 {
		return nil
	}
	all := make([]work, 1+n/4%2)
	for i := range all {
		all[i] = work{Name: fmt.Sprintf("%s+%d", w.Name, i), Form: formPart}
	}
	return all
}

// group enqueues a group: its parts, and the job that waits for them, which comes last.
func (e onceqEnqueuer) group(ctx context.Context, tx pgx.Tx, op string, works []work) (answers []answer, err error) {
	parts, last := works[:len(works)-1], works[len(works)-1]
	members := make([]onceq.Job, len(parts))
	for i, w := range parts {
		members[i] = onceqJob(w, op)
	}
	s, then := last.shape(), onceqJob(last, op)
	then.IfDead = s.rule
	after := func(name string) { then.After = append(then.After, onceq.JobRef{Scope: formPart, Key: name}) }
	for _, name := range last.After {
		after(name)
	}
	var db onceq.DB = e.pool
	if tx != nil {
		db = tx
	}
	var results []onceq.Result
	switch {
	case s.how == byID && tx != nil:
		if results, err = e.q.EnqueueMany(ctx, db, members); err != nil {
			return nil, err
		}
		for _, r := range results {
			then.After = append(then.After, onceq.JobRef{ID: r.ID})
		}
		var r onceq.Result
		r, err = e.q.Enqueue(ctx, db, then)
		results = append(results, r)
	case s.how == byKey && last.Keyed:
		for _, w := range parts {
			after(w.Name)
		}
		results, err = e.q.EnqueueMany(ctx, db, append(members, then))
	default:
		var g onceq.Group
		if g, err = e.q.EnqueueGroup(ctx, db, members, then); g.Then.Duplicate {
			return []answer{onceqAnswer(last, g.Then)}, err
		}
		results = append(g.Members, g.Then)
	}
	if err != nil {
		return nil, err
	}
	for i, r := range results {
		answers = append(answers, onceqAnswer(works[i], r))
	}
	return answers, nil
}

func (w *onceqWorker) part(ctx context.Context, tx pgx.Tx, l *onceq.Lease, p work) error {
	if err := trouble(l, p); err != nil {
		return err
	}
	var jobs []onceq.Job
	for _, a := range p.added() {
		jobs = append(jobs, onceqJob(a, ""))
	}
	if len(jobs) > 0 {
		if _, err := l.AddMembers(ctx, tx, jobs...); err != nil {
			return err
		}
	}
	if err := effect(ctx, tx, l, p, nonce()); err != nil {
		return err
	}
	p.take(ctx)
	return nil
}

// join writes down what came of the jobs that it has waited for.
func (w *onceqWorker) join(ctx context.Context, tx pgx.Tx, l *onceq.Lease, p work) error {
	for m, err := range l.Members(ctx) {
		if err != nil {
			return err
		}
		var result string
		if m.Result != nil {
			if err := json.Unmarshal(m.Result, &result); err != nil {
				return err
			}
		}
		if _, err := tx.Exec(ctx, `insert into torture.joined (job, member, state, result) values ($1, $2, $3, $4)`,
			identity(l.ID, l.CreatedAt), m.ID, m.State, result); err != nil {
			return err
		}
	}
	return w.tx(ctx, tx, l, p)
}

// groupTables are the audit trail of groups, and what the jobs that wait were told. A row of the trail takes its number under
// the lock that decides: who brings a member back has that of the job that waits, and who lets that one go on has it too.
const groupTables = `
create table torture.joined (seq bigint generated always as identity, job bigint, member bigint, state smallint, result text);
create table torture.group_trail (
  seq bigint generated always as identity, at timestamptz default clock_timestamp(),
  what text, id bigint, member bigint not null default 0, state smallint not null default 0, rule smallint not null default 0
);
create function torture.trail_group() returns trigger language plpgsql as $$
begin
  if tg_argv[0] = 'member' then
    insert into torture.group_trail (what, id, member, state) values ('member', new.group_id, new.job_id, new.state);
  elsif tg_op = 'INSERT' then
    insert into torture.group_trail (what, id, rule) values ('waits', new.id, new.if_dead);
  else
    insert into torture.group_trail (what, id, rule) values ('left', old.id, old.if_dead);
  end if;
  return null;
end $$;
create trigger group_member after insert or update on onceq.job_members for each row execute function torture.trail_group('member');
create trigger group_waits after insert on onceq.job_waits for each row when (new.if_dead is not null) execute function torture.trail_group('waits');
create trigger group_left after delete on onceq.job_waits for each row when (old.if_dead is not null) execute function torture.trail_group('left');`

// groupStep is a row of the audit trail of groups.
type groupStep struct {
	What   string // of a job: it waits, or left; or member
	Group  int64  // the id of the job that waits
	Member int64
	State  onceq.State
	Rule   onceq.DeadRule
	At     time.Time
}

// joinedRow is what a job was told of one that it had waited for.
type joinedRow struct {
	Job    int64 // its identity
	Member int64 // an id
	State  onceq.State
	Result string
}

func (h *history) collectGroups(ctx context.Context, pool *pgxpool.Pool) (err error) {
	h.Groups, err = pgx.CollectRows(query(ctx, pool, `select what, id, member, state, rule, at from torture.group_trail order by seq`), pgx.RowToStructByPos[groupStep])
	if err != nil {
		return err
	}
	h.Joined, err = pgx.CollectRows(query(ctx, pool, `select job, member, state, result from torture.joined order by seq`), pgx.RowToStructByPos[joinedRow])
	return err
}

// These are mistakes in the library that the checker must find: the end of a member calls nobody, and a promoter lets a job
// go on without a look at whether a member is unfinished.
var groupMistakes = map[string]struct{ function, from, to string }{
	brokenTell:   {"onceq.tell", " into lines from told", " into lines from told where false"},
	brokenFollow: {"onceq.follow", "where group_id = u.id and state = 0 order by", "where false order by"},
}

// breakGroups makes such a mistake.
func breakGroups(ctx context.Context, url, mistake string) error {
	m, ok := groupMistakes[mistake]
	if !ok {
		return nil
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var body string
	if err := conn.QueryRow(ctx, `select pg_get_functiondef($1::regproc)`, m.function).Scan(&body); err != nil {
		return err
	}
	if !strings.Contains(body, m.from) {
		return errors.New(m.function + " does not contain what the mistake replaces: " + m.from)
	}
	_, err = conn.Exec(ctx, strings.Replace(body, m.from, m.to, 1))
	return err
}

// joinState is what the checker knows of a group.
type joinState struct {
	rule    onceq.DeadRule
	members map[int64]groupStep
	waits   bool
	since   time.Time // when it began to wait, or a member last changed
}

// open says why a job may not go on yet, or "".
func (g *joinState) open() string {
	for _, id := range slices.Sorted(maps.Keys(g.members)) {
		switch m := g.members[id]; {
		case m.State == 0, m.State == onceq.StateHeld,
			m.State == onceq.StateDead && g.rule != onceq.DeadRun, m.State == onceq.StateCancelled && g.rule == onceq.DeadCancel:
			return fmt.Sprintf("job %d is %s and the rule is %s", id, m.State, g.rule)
		}
	}
	return ""
}

// redriven says whether a member may be unfinished when the job runs: it was dead and came back, or a part that came back has
// added it.
func (g *joinState) redriven(member int64, e end) bool {
	_, before := g.members[member]
	return g.rule == onceq.DeadRun && (e.hopeless() || !before)
}

// checkGroups replays the audit trail of groups, compares it with that of jobs, and compares what the jobs that wait were told
// with what is true. Ids that came twice because the sequence was set back are left out.
func (v *verdict) checkGroups(h *history, ends map[int64]end) {
	byID, twice := map[int64]int64{}, map[int64]bool{}
	gone, claimed := map[int64]int{}, map[int64]int{} // by identity: the first such step
	for i, s := range h.Trail {
		switch s.What {
		case "accepted":
			id := idOf(s.Job)
			if other, known := byID[id]; known && other != s.Job {
				twice[id] = true
			}
			byID[id] = s.Job
		case "gone":
			if _, again := gone[s.Job]; !again {
				gone[s.Job] = i + 1
			}
		case "claimed":
			if _, again := claimed[s.Job]; !again {
				claimed[s.Job] = i + 1
			}
		}
	}
	groups := map[int64]*joinState{}
	for _, s := range h.Groups {
		g := groups[s.Group]
		if g == nil {
			g = &joinState{members: map[int64]groupStep{}}
			groups[s.Group] = g
		}
		ran := claimed[byID[s.Group]]
		switch {
		case s.What == "waits":
			g.waits, g.rule, g.since = true, s.Rule, s.At
		case s.What == "member" && (g.waits || len(g.members) == 0):
			g.members[s.Member], g.since = s, s.At
		case s.What == "left" && g.waits:
			g.waits = false
			if ran == 0 || twice[s.Group] { // it was cancelled
				continue
			}
			v.Joins++
			if why := g.open(); why != "" {
				v.violation(vGroup, "job %d went on, and of those that it waits for %s", s.Group, why)
			}
			waited := s.At.Sub(g.since)
			v.JoinWait = max(v.JoinWait, waited)
			if waited > joinBound {
				v.violation(vGroup, "job %d waited for %s after all others were done", s.Group, waited.Round(time.Second))
			}
			for _, id := range slices.Sorted(maps.Keys(g.members)) {
				if at := gone[byID[id]]; !twice[id] && (at == 0 || at > ran) {
					v.violation(vGroup, "job %d was claimed before job %d ended", s.Group, id)
				}
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(groups)) {
		g := groups[id]
		if g.waits && g.open() == "" && len(g.members) > 0 && !twice[id] {
			v.violation(vGroup, "job %d still waits, and all others are done", id)
		}
	}
	v.checkJoined(h, ends, byID, twice, groups)
}

// checkJoined looks at what the jobs that waited were told.
func (v *verdict) checkJoined(h *history, ends map[int64]end, byID map[int64]int64, twice map[int64]bool, groups map[int64]*joinState) {
	nonces := map[int64]string{}
	for _, e := range h.Ledger {
		nonces[e.Job] = e.Nonce
	}
	of := map[string]int{} // how many jobs had this work: a key is free again once its job was cancelled before it started
	for _, e := range ends {
		of[e.Work]++
	}
	heard := map[int64]map[int64]bool{}
	for _, r := range h.Joined {
		group := idOf(r.Job)
		if heard[r.Job] == nil {
			heard[r.Job] = map[int64]bool{}
		}
		if heard[r.Job][r.Member] {
			v.violation(vGroup, "job %d was told of job %d twice", group, r.Member)
		}
		heard[r.Job][r.Member] = true
		v.Joined++
		if twice[group] || twice[r.Member] {
			continue
		}
		job := byID[r.Member]
		e := ends[job]
		// Somebody may have had it just then, so that nobody tells its result.
		older := !strings.HasPrefix(e.Work, partsOf(ends[r.Job].Work)) || of[ends[r.Job].Work] > 1
		switch {
		case r.State == onceq.StateCompleted && e.State == "completed" && (r.Result == nonces[job] || r.Result == "" && older):
		case r.State == onceq.StateDead && e.hopeless() && r.Result == "": // it may have been redriven since
		case !r.State.Finished() && groups[group] != nil && groups[group].redriven(r.Member, e) && r.Result == "":
		case r.State == onceq.StateCancelled && e.State == "cancelled" && r.Result == "":
		default:
			v.violation(vGroup, "job %d was told that job %d (%s) is %s with %q, and it is %s with %q",
				group, r.Member, e.Work, r.State, r.Result, e.State, nonces[job])
		}
	}
	for _, id := range slices.Sorted(maps.Keys(ends)) {
		e := ends[id]
		if e.Form != formJoin || e.State != "completed" || twice[idOf(id)] {
			continue
		}
		names := map[string]bool{}
		known := true
		for member := range heard[id] {
			known = known && !twice[member]
			names[ends[byID[member]].Work] = true
		}
		for _, w := range (work{Name: e.Work, Form: formJoin}).members() {
			if known && !names[w.Name] {
				v.violation(vGroup, "job %d (%s) was not told of %s", idOf(id), e.Work, w.Name)
			}
		}
		if g := groups[idOf(id)]; g != nil { // a second run may be told of parts that were added since it went on
			for _, member := range slices.Sorted(maps.Keys(g.members)) {
				if !heard[id][member] {
					v.violation(vGroup, "job %d (%s) was not told of job %d", idOf(id), e.Work, member)
				}
			}
		}
	}
}

// joins reports whether works are a group.
func joins(works []work) bool { return len(works) > 0 && works[len(works)-1].Form == formJoin }
