package claimer

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/paused"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// nobody claims, runs and promotes nothing.
type nobody struct {
	Worker
	Promoter
}

func (nobody) GiveBack(string, func(string, time.Time) bool) (some, anyWait bool) { return }
func (nobody) Expects() bool                                                      { return false }
func (nobody) Rouse(string)                                                       {}

// jobs are claimed ones, of which only the size of the payloads is known.
type jobs []int64

func (j jobs) Len() int                       { return len(j) }
func (j jobs) At(int) (at cursor.Position)    { return at }
func (j jobs) First() (quarantine.Job, int64) { return quarantine.Job{}, 0 }
func (j jobs) Bytes() (n int64) {
	for _, size := range j {
		n += size
	}
	return n
}

func newTest(queues ...string) *Claimer {
	var all []*Slots
	for _, name := range queues {
		all = append(all, &Slots{Queue: name, Count: 100, Width: 1})
	}
	c := New(Config{
		Store: new(pg.Store), Troubles: &watch.Troubles{Log: slog.Default()}, Log: slog.Default(), Paused: paused.New(), Turn: new(quarantine.Turn),
		Worker: nobody{}, ID: 1, Kinds: []string{"k"}, Lease: time.Minute,
	}, all, nil)
	c.Promoter = nobody{}
	return c
}

// A brief claim that found nothing is followed by a claim soon, whether the queue is announced or not, and where many others wait by
// a look at the time when a claim looks back. One that looked back is not.
func TestClaimer_LooksBackAfterABriefClaimThatFoundNothing(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(*Claimer, *feed){
		"announced": func(_ *Claimer, f *feed) { f.news.announced = time.Now() },
		"not":       func(*Claimer, *feed) {},
		"lively":    func(c *Claimer, _ *feed) { c.announcement.stir.lively = true },
		"backed":    func(c *Claimer, _ *feed) { c.announcement.backed = true },
	} {
		c := newTest("default")
		c.Listener.Confirmed.Store(true)
		f, now := c.byName["default"], time.Now()
		claimed := func(how cursor.Look) {
			f.plan.again, f.lookAt, c.looks.soon, f.latest.found = time.Time{}, time.Time{}, nil, now.Add(-time.Hour)
			c.took(f, &Ask{Jobs: jobs{}, Asked: cursor.Asked{From: cursor.FromStart(), Limit: 1, Now: now}}, how, now.Add(-100*time.Millisecond), now)
		}
		set(c, f)
		claimed(cursor.Whole)
		require.True(t, f.plan.again.IsZero() || name == "not" && f.news.announced.IsZero(), name)
		require.False(t, f.lookAt.After(now), name)
		f.plan.pause = 0
		for range 10 { // in the end each pause is as long as they get
			claimed(cursor.Brief)
			if name == "backed" {
				require.True(t, f.plan.again.IsZero(), "that would take what others were woken for")
				require.Equal(t, f.cursor.NextLook(), f.lookAt)
				continue
			}
			require.True(t, f.plan.again.After(now), name)
			require.False(t, f.plan.again.After(now.Add(rhythm.Moment)), name)
			require.Equal(t, name == "not", c.announcement.wanted, "that a claim looks back soon keeps nobody from being told of this one")
			c.announced([]*feed{f}, []int{f.news.heard}, c.announcement.era, nil)
			require.False(t, f.plan.again.IsZero(), "the claim that looks back still comes")
			f.news.announced, c.announcement.wanted = time.Time{}, false
			set(c, f)
		}
	}
}

func TestMoreOf(t *testing.T) {
	t.Parallel()
	for payload, want := range map[string]struct {
		queue string
		looks time.Duration
	}{
		"default":                          {},
		"":                                 {},
		"\x1f15\x1fdefault":                {"default", looksBriefly},
		"\x1f100\x1fdefault":               {"default", looksLong},
		"\x1f100\x1f\x1f15\x1fa":           {"\x1f15\x1fa", looksLong},
		"\x1f100\x1f":                      {"", looksLong},
		"\x1fdefault":                      {},
		"\x1f\x1fdefault":                  {},
		"\x1f-1\x1fdefault":                {},
		"\x1f0\x1fdefault":                 {"default", 0},
		"\x1f99999999999999999999\x1fsome": {},
	} {
		queue, looks := MoreOf(payload)
		require.Equal(t, want.queue, queue, "%q", payload)
		require.Equal(t, want.looks, looks, "%q", payload)
	}
}

// One write of the announcement that waited for the disk does not keep the next one for longer.
func TestClaimer_RestsBetweenAnnouncements(t *testing.T) {
	t.Parallel()
	c := newTest("default")
	rest := func(took time.Duration) time.Duration {
		c.announcement.written = time.Now().Add(-took)
		c.announced(nil, nil, c.announcement.era, nil)
		return c.announcement.rest
	}
	for range 4 {
		rest(2 * time.Millisecond)
	}
	require.Less(t, rest(200*time.Millisecond), rhythm.Briefly)
	for range 2 {
		rest(200 * time.Millisecond)
	}
	require.Equal(t, rhythm.Briefly, rest(200*time.Millisecond))
}

// A feed begins anew when something of it was resumed, because that is before its cursor, and not when something was paused.
func TestClaimer_OnlyWhatIsResumedBeginsAnew(t *testing.T) {
	t.Parallel()
	c := newTest("default", "other")
	c.Kinds = []string{"k", "l"}
	c.kinds = c.Kinds
	f, other := c.byName["default"], c.byName["other"]
	obey := func(what, name []string) (anew, otherAnew bool) {
		now := time.Now()
		f.cursor.ReachedEnd(now)
		other.cursor.ReachedEnd(now)
		c.obey(c.Paused.Take(now, what, name))
		return f.cursor.Places[0].RunAt.Equal(cursor.Beginning), other.cursor.Places[0].RunAt.Equal(cursor.Beginning)
	}
	begins := func(anew, otherAnew bool) []bool { return []bool{anew, otherAnew} }
	require.Equal(t, []bool{false, false}, begins(obey([]string{"kind"}, []string{"k"})))
	require.Equal(t, []bool{false, false}, begins(obey([]string{"kind", "queue"}, []string{"k", "default"})))
	require.Equal(t, []bool{true, false}, begins(obey([]string{"kind"}, []string{"k"})))
	require.Equal(t, []bool{true, true}, begins(obey([]string{"kind"}, []string{"l"})))
	require.Equal(t, []bool{true, true}, begins(obey(nil, nil)))
}

// A promoter that relies on being woken must be woken for a job of each queue.
func TestPromoter_RestsLongOnlyWhileEachQueueIsAnnounced(t *testing.T) {
	t.Parallel()
	c := newTest("default", "a", "b")
	now := time.Now()
	announce := func(feeds ...*feed) bool {
		var heard []int
		for _, f := range feeds {
			heard = append(heard, f.news.heard)
		}
		c.announced(feeds, heard, c.announcement.era, nil)
		return c.Listener.Waits.Load()
	}
	a, b := c.byName["a"], c.byName["b"]
	require.False(t, announce(a), "the other two are busy")
	require.True(t, announce(c.feeds...))
	b.paused = true
	c.unannounced(b)
	require.False(t, c.Listener.Waits.Load())
	require.True(t, announce(a), "nothing of a paused queue may start")

	c.Heard("a", false)
	require.True(t, announce(a), "this used up no announcement")
	c.hear(now)
	require.True(t, a.plan.due)
	require.True(t, c.Listener.Waits.Load())

	c.Heard("a", true)
	require.False(t, announce(a), "the notification came before the answer")
	c.hear(now)
	require.False(t, c.Listener.Waits.Load())
	require.True(t, a.news.announced.IsZero())
	require.True(t, announce(a))
	c.forget()
	require.False(t, c.Listener.Waits.Load())
}

// Behind a pooler nothing is ever announced, and the time of the next announcement has passed.
func TestClaimer_RestsWhileNothingCanBeAnnounced(t *testing.T) {
	t.Parallel()
	c := newTest("default")
	now := time.Now()
	c.rescans.known, c.looks.at = now, now.Add(time.Second)
	require.Equal(t, time.Second, c.startUpkeep(t.Context(), now), "the next look is what it waits for")
}

func TestRescans_TheirIntervalGrowsWithTheirCost(t *testing.T) {
	t.Parallel()
	var r rescans
	require.Equal(t, rhythm.RescanEvery, r.interval())
	r.looks = [2]time.Duration{time.Second, 20 * time.Millisecond}
	require.Equal(t, 2*time.Second, r.interval(), "one that was slow may have had to wait for something")
	r.pages = [2]time.Duration{5 * time.Millisecond, time.Minute}
	require.Equal(t, 2*time.Second, r.interval(), "a page that had to wait, too")
	r.pages = [2]time.Duration{time.Second, 2 * time.Second}
	require.Equal(t, 20*time.Second, r.interval())
}

func TestRescans_RoomOfAFeed(t *testing.T) {
	t.Parallel()
	c := newTest("default")
	f := c.feeds[0]
	s := f.slots
	s.Count = 4
	require.True(t, f.hasRoom())
	s.Outstanding.Store(3)
	require.True(t, f.hasRoom(), "one is free")
	s.Outstanding.Store(4)
	require.False(t, f.hasRoom())
	s.Returned.Add(1)
	require.True(t, f.hasRoom(), "one has returned")
	require.False(t, f.hasRoom())
}

// A job whose slot has come stands before the others that have lost as many leases, when no claim is under way.
func TestQuarantine_SlotsThatHaveCome(t *testing.T) {
	c := newTest("default")
	f := c.feeds[0]
	f.quarantine.Saw([]quarantine.Job{{ID: 1, Lost: 1}, {ID: 2, Lost: 2}})
	f.busy = true
	for id, lost := range map[int64]int{8: 1, 9: 2} {
		c.Suspended(f.queue, quarantine.Job{ID: id, Lost: lost}, time.Now())
		<-c.wake
	}
	c.hear(time.Now())
	require.Equal(t, []int64{1, 2}, f.quarantine.IDs, "an answer is awaited")
	f.busy = false
	c.hear(time.Now())
	require.Equal(t, []int64{8, 1, 9, 2}, f.quarantine.IDs)
	few, _ := f.quarantine.Next()
	require.Equal(t, []int64{8, 1}, few)
	require.True(t, f.active)
	f.quarantine.Past(1)
	few, _ = f.quarantine.Next()
	require.Equal(t, []int64{1}, few)
}

// A completion that wants a place for the next job of its lane does not make its queue one that waits for connections: nobody
// asks again for it, and the other queues would stay narrowed.
func TestConnections_AReservedPlaceNarrowsNoOtherQueue(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none?pool_max_conns=8")
	require.NoError(t, err)
	defer pool.Close()
	c := &pg.Shares{Pool: pool}
	queue := func() *Slots {
		return &Slots{Count: 6, Width: 1, Pooled: true, Conns: 6, Signal: func() {}}
	}
	lane, other := queue(), queue()
	c.Join(lane)
	c.Join(other)
	lane.Outstanding.Store(1)
	other.Outstanding.Store(5)
	require.True(t, lane.Reserve(c, 1))
	lane.Outstanding.Add(-1)
	other.Outstanding.Store(4)
	require.Equal(t, 5, c.Allow(other))

	lane.Outstanding.Store(6)
	other.Outstanding.Store(0)
	require.Zero(t, c.Allow(other))
	require.False(t, lane.Reserve(c, 1), "the other queue waits for a connection")
	c.WantNone(other)
	require.True(t, lane.Reserve(c, 1), "it is paused")
	lane.Outstanding.Add(-1)
	require.Zero(t, c.Allow(other))
	require.False(t, lane.Reserve(c, 1))
	c.Leave(other)
	require.True(t, lane.Reserve(c, 1))
	require.False(t, lane.Reserve(c, 1), "only one of the places that become free is the caller's")
}

// What is claimed beyond the slots is what handlers do in the time that a job may wait for a slot and, where a claim waits for its
// turn, in that time too.
func TestPace_WhatIsClaimedAheadLastsUntilTheNextTurn(t *testing.T) {
	t.Parallel()
	now := time.Now()
	s := &Slots{Count: 100}
	s.Returned.Store(1000)
	s.Worked.Store(1000 * int64(time.Millisecond)) // so they could do 100,000 a second
	p := pace{rate: 4000, counted: 1000, countedAt: now}
	require.EqualValues(t, 100, p.prefetch(s, now, 0))
	require.EqualValues(t, 500, p.prefetch(s, now, 100*time.Millisecond))
	require.EqualValues(t, table.ChunkRows, p.prefetch(s, now, time.Second))
	p.claimed(jobs{1 << 20, 3 << 20})
	require.EqualValues(t, 8, p.prefetch(s, now, time.Second), "16 MiB of them")
	for range 30 {
		p.claimed(jobs{1})
	}
	require.EqualValues(t, table.ChunkRows, p.prefetch(s, now, time.Second), "small ones again")
	p.careful = true
	require.Zero(t, p.prefetch(s, now, time.Second), "a job of which no lease may be lost is claimed when it can start")
}

// A claim that waits for its turn in a queue in which others claim takes what lasts until the next turn, up to a limit.
func TestWant_LastsUntilTheNextTurn(t *testing.T) {
	t.Parallel()
	s := &Slots{Count: 100, Width: 1}
	s.Returned.Store(1000)
	s.Worked.Store(1000 * int64(time.Millisecond))
	c := &Claimer{}
	want := func(took time.Duration, others bool) int {
		f := &feed{slots: s, pace: pace{rate: 4000, counted: 1000, countedAt: time.Now().Add(time.Hour)}, turns: turns{waited: took}}
		if others {
			f.turns.others = time.Now().Add(time.Hour)
		}
		return c.want(f).n
	}
	require.Equal(t, 200, want(100*time.Millisecond, false))
	require.Equal(t, 200, want(0, true))
	require.Equal(t, 600, want(100*time.Millisecond, true))
	require.Equal(t, 1200, want(time.Second, true))
}

// A look at what is new goes back by a time at least, and by twice that time if looks come often.
func TestLookBack(t *testing.T) {
	t.Parallel()
	var b lookBack
	began := time.Now()
	at := func(ms int) time.Time { return began.Add(time.Duration(ms) * time.Millisecond) }
	for ms := 0; ms <= 100; ms += 2 { // the id is the millisecond, from 1 on
		if ms > 40 {
			require.GreaterOrEqual(t, int64(ms)-(b.from-1), int64(20), "at %d", ms)
			require.LessOrEqual(t, int64(ms)-(b.from-1), int64(46), "at %d", ms)
		}
		b.saw(int64(ms)+1, at(ms), at(ms), rhythm.Moment)
	}
}

// The id is read at the end of a message that took long: what was enqueued meanwhile counts as new.
func TestLookBack_AfterAMessageThatTookLong(t *testing.T) {
	t.Parallel()
	var b lookBack
	at := func(ms int) time.Time { return time.Time{}.Add(time.Duration(ms) * time.Millisecond) }
	b.saw(1, at(0), at(1), rhythm.Moment)
	b.saw(100, at(30), at(130), rhythm.Moment)
	b.saw(132, at(131), at(132), rhythm.Moment)
	require.Equal(t, int64(1), b.from, "the id 100 was drawn a millisecond ago")
	b.saw(152, at(151), at(152), rhythm.Moment)
	require.Equal(t, int64(100), b.from)
}

// What a look took by itself while the process stood still does not put off those that come after it: a look that goes along with
// a claim says that it took less.
func TestClaimer_ALookThatMetAPauseDoesNotPutOffOthers(t *testing.T) {
	t.Parallel()
	c := newTest("default")
	c.looks.fresh.took = time.Minute
	now := time.Now()
	look := &newLook{began: now, done: true}
	c.wentAlong(look, now.Add(time.Millisecond), nil)
	c.sawNew(look, now.Add(time.Millisecond))
	require.Equal(t, now.Add(time.Millisecond+livelyHold), c.looks.fresh.at)
	c.wentAlong(look, now.Add(time.Second), errors.New("the claim failed"))
	require.Zero(t, c.looks.fresh.took, "the next one is sent by itself")
	require.Equal(t, now.Add(time.Second), c.looks.fresh.at)
}

// While looks find something, the next one comes soon. Otherwise they take a part of the time.
func TestClaimer_LooksAtWhatIsNewRestWhereThereIsNothing(t *testing.T) {
	t.Parallel()
	c := newTest("default")
	now := time.Now()
	rest := func(took time.Duration, queues ...string) time.Duration {
		c.looks.fresh.took = took
		c.sawNew(&newLook{began: now, done: true, queues: queues}, now)
		return c.looks.fresh.at.Sub(now)
	}
	const took = 2 * livelyHold
	for n := range 10 {
		require.Equal(t, min(time.Duration(n+1), rhythm.Fifth)*took, rest(took, "of others"))
	}
	require.Equal(t, took, rest(took, "default"))
	require.Equal(t, took, rest(took, "default"), "it is known that it is due")
	require.Equal(t, 2*took, rest(took))
	require.Equal(t, livelyHold, rest(time.Microsecond, "default"))
	c.byName["default"].paused = true
	require.Equal(t, 2*took, rest(took, "default"))
}

// On Citus the ids that were drawn and the jobs are on different servers, so there all looks are at all queues.
func TestClaimer_OnCitusNoLooksAtWhatIsNew(t *testing.T) {
	t.Parallel()
	c := newTest("default")
	took := livelyLook
	c.announcement.stir.lively, c.looks.took = true, [2]time.Duration{took, took}
	require.True(t, c.looksAtNew())
	require.Equal(t, rhythm.Twentieth*took, c.lookInterval())
	c.Store.Citus.Store(pg.CitusYes)
	require.False(t, c.looksAtNew())
	require.Equal(t, rhythm.Fifth*took, c.lookInterval())
}

// Where many others wait, a run that was woken announces itself after the job, and no later because of further ones. Otherwise it does
// so at once.
func TestClaimer_AnnouncesItselfAfterTheJobWhereManyWait(t *testing.T) {
	t.Parallel()
	for _, many := range []bool{false, true} {
		c := newTest("default")
		c.Listener.Confirmed.Store(true)
		a, f, now := &c.announcement, c.feeds[0], time.Now()
		a.many, a.written = many, now.Add(-time.Second)
		c.settle(f, now)
		require.True(t, a.wanted)
		if !many {
			require.LessOrEqual(t, a.wait(now), time.Duration(0))
			continue
		}
		require.Equal(t, rhythm.Moment, a.wait(now))
		c.settle(f, now.Add(rhythm.Moment/2))
		require.Equal(t, rhythm.Moment, a.wait(now))
		a.wanted, a.notYet, f.news.looking.until = false, time.Time{}, now // jobs came often
		c.settle(f, now)
		require.LessOrEqual(t, a.wait(now), time.Duration(0))
	}
}

// Where jobs come often, claims do not wait for a statement that looks at thousands of queues.
func TestLooks_PagesAreSmallWhereJobsComeOften(t *testing.T) {
	t.Parallel()
	l := looks{each: [2]time.Duration{10 * time.Microsecond, time.Millisecond}}
	require.Equal(t, 2000, l.page(false))
	require.Equal(t, 1000, l.page(true))
	l.fresh.at = time.Now()
	require.Equal(t, 200, l.page(false))
	require.Equal(t, 100, l.page(true))
}

// Thousands of queues need several statements for a look, and there is no more than one a second.
func TestClaimer_LooksInSeveralStatementsAreRare(t *testing.T) {
	t.Parallel()
	all := []string{"default"}
	for i := range 5000 {
		all = append(all, fmt.Sprint("q", i))
	}
	c := newTest(all...)
	c.Listener.Confirmed.Store(true)
	c.looks.each = [2]time.Duration{5 * time.Microsecond, 5 * time.Microsecond} // 25 ms
	c.looks.took = [2]time.Duration{time.Millisecond, time.Millisecond}
	require.Equal(t, 3*pollListening, c.lookInterval())
	c.Listener.Waits.Store(true)
	c.Listener.leaves.Store(true)
	require.Equal(t, pollLeaving, c.lookInterval())
	c.looks.each = [2]time.Duration{10 * time.Microsecond, 10 * time.Microsecond}
	require.Equal(t, 6*pollListening, c.lookInterval())
}

// ⚠ While something was paused and the database was away, the claimer's next look at what is paused was overdue and not allowed yet, so
// it thought again at once, all the time.
func TestTrap_TheClaimerRestsWhileSomethingIsPausedAndTheDatabaseIsAway(t *testing.T) {
	t.Parallel()
	c := newTest("default")
	now := time.Now()
	c.obey(&paused.Set{At: now.Add(-time.Minute), Queues: map[string]bool{"default": true}})
	c.rescans.known = time.Now()
	c.looks.notAgain = now.Add(time.Second) // as after a look that failed
	require.Equal(t, time.Second, c.startUpkeep(t.Context(), now))
}
