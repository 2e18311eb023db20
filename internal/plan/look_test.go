package plan

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/rhythm"
)

// What a look means for a queue.
func TestPlan_AfterALook(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		what  string
		given func(s *State, q *Queue)
		saw   Seen
		a     string
		wait  time.Duration // until something of it becomes due
	}{
		{"nothing is due", func(*State, *Queue) {}, Seen{}, "idle", rhythm.LongestNap},
		{"a job is due", func(*State, *Queue) {}, Seen{Next: []int64{1}, In: []int64{0}}, "due", rhythm.LongestNap},
		{"a job is due in another queue", func(*State, *Queue) {}, Seen{Next: []int64{2}, In: []int64{0}}, "idle", rhythm.LongestNap},
		{"one is due soon", func(*State, *Queue) {}, Seen{Next: []int64{1}, In: []int64{5000}}, "idle", 5 * ms},
		{"one is due soon, and is left to others", func(s *State, q *Queue) { s.announcement.leaves = true }, Seen{Next: []int64{1}, In: []int64{5000}}, "idle",
			rhythm.LongestNap},
		{"one is due, and it is paused", func(s *State, q *Queue) { q.paused = true }, Seen{Next: []int64{1}, In: []int64{0}}, "idle", rhythm.LongestNap},
		{"one is due, and was claimed meanwhile", func(s *State, q *Queue) { q.moves++ }, Seen{Next: []int64{1}, In: []int64{0}}, "idle", rhythm.LongestNap},
		{"one is due, and a claim is under way", func(s *State, q *Queue) { q.busy = true }, Seen{Next: []int64{1}, In: []int64{0}}, "an answer",
			rhythm.LongestNap},
		{"it follows an announcement", func(s *State, q *Queue) { q.news.announced, q.news.follows = at(-ms), true }, Seen{}, "look in 10ms",
			rhythm.LongestNap},
		{"the second one", func(s *State, q *Queue) { q.news.announced, q.news.follows = at(-lookFollows-ms), true }, Seen{}, "look in 21ms",
			rhythm.LongestNap},
		{"the last one", func(s *State, q *Queue) { q.news.announced, q.news.follows = at(-lookEnough-ms), true }, Seen{}, "idle", rhythm.LongestNap},
		{"jobs were left to this run", func(s *State, q *Queue) { q.news.left = at(-ms) }, Seen{}, "look in 98ms", rhythm.LongestNap},
	} {
		s := quiet("a", "b")
		q := s.Queues[0]
		look := s.look(s.Queues, nil, noon)
		row.given(s, q)
		row.saw.Now = noon
		s.Looked(look, &row.saw, at(-ms), noon, free)
		require.Equal(t, row.a, next(s, q), row.what)
		require.Equal(t, row.wait, s.becomeDue(noon), row.what)
	}
}

// A look at all goes over the queues in pages. When it has ended, it says what the next one costs, and where to rescan.
func TestPlan_LooksAtAllInPages(t *testing.T) {
	t.Parallel()
	var names []string
	for i := range perStatement + 2 {
		names = append(names, fmt.Sprintf("q%03d", i))
	}
	s := quiet(names...)
	s.looks.at, s.rescans.asked, s.looks.each = noon, at(-time.Minute), [2]time.Duration{time.Second, time.Second}
	look := func(behind, calls bool) *Look {
		l := s.nextLook(noon).(*Look)
		require.Equal(t, behind, l.Behind)
		require.Equal(t, calls, l.Calls)
		return l
	}
	first := look(true, true)
	require.Len(t, first.Queues, perStatement)
	require.True(t, first.Since.IsZero(), "for all calls")
	s.Looked(first, &Seen{Now: noon, Behind: []int64{2}}, noon, at(100*ms), outstanding(9))
	require.Equal(t, ms, s.looks.each[0])
	require.Empty(t, s.rescans.queues)
	second := look(true, false)
	require.Equal(t, []string{"q100", "q101"}, Names(second.Queues))
	s.Looked(second, &Seen{Now: noon, Behind: []int64{1}}, noon, at(30*ms), outstanding(9))
	require.Equal(t, []string{"q001", "q100"}, Names(s.rescans.queues))
	require.Len(t, s.Actions()[0].(*Quiet).Queues, perStatement)
	require.Equal(t, [2]time.Duration{130 * ms, 0}, s.rescans.looks)

	s.looks.at, s.looks.each = noon, [2]time.Duration{}
	first = look(false, true)
	require.Len(t, first.Queues, perStatement+2)
	require.Equal(t, at(-rhythm.CallMargin), first.Since, "the others were looked for a moment ago")
	s.Looked(first, &Seen{Now: noon}, noon, at(20*ms), free)
	require.Equal(t, [2]time.Duration{20 * ms, 0}, s.looks.took)
}

// A look that fails puts off the next one.
func TestPlan_AfterLooksThatFailed(t *testing.T) {
	t.Parallel()
	s := quiet("a", "b")
	for n, wait := range []time.Duration{100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 5 * time.Second, 5 * time.Second} {
		s.looks.at, s.looks.notAgain = noon, noon
		require.Equal(t, "look at all and for calls: a b", word(s.nextLook(noon)))
		require.Equal(t, wait, s.LookFailed(noon), n)
		require.Nil(t, s.nextLook(at(wait/2-1)))
		require.Equal(t, wait/2, s.looks.wait(noon), "the rest is random")
	}
	require.Equal(t, "look: b", word(s.look(s.Queues[1:], nil, noon)))
	s.Queues[1].news.follows, s.Lanes = true, true
	require.Equal(t, "look and for calls: b", word(s.look(s.Queues[1:], nil, noon)), "what was enqueued just before may be in a lane")
	s.Works(noon)
	require.Equal(t, []string{"not all told"}, words(s.Actions()), "it is not known who knows of the announcement")
	s.Works(noon)
	require.Empty(t, s.Actions())
}

// A look at what is new goes back by a time at least, and by twice that time if looks come often.
func TestPlan_LookBack(t *testing.T) {
	t.Parallel()
	var b lookBack
	for n := 0; n <= 100; n += 2 { // the id is the millisecond, from 1 on
		if n > 40 {
			require.GreaterOrEqual(t, int64(n)-(b.from-1), int64(20), "at %d", n)
			require.LessOrEqual(t, int64(n)-(b.from-1), int64(46), "at %d", n)
		}
		now := at(time.Duration(n) * ms)
		b.saw(int64(n)+1, now, now, rhythm.Moment)
	}
}

// The id is read at the end of a message that took long: what was enqueued meanwhile counts as new.
func TestPlan_LookBackAfterAMessageThatTookLong(t *testing.T) {
	t.Parallel()
	var b lookBack
	b.saw(1, at(0), at(ms), rhythm.Moment)
	b.saw(100, at(30*ms), at(130*ms), rhythm.Moment)
	b.saw(132, at(131*ms), at(132*ms), rhythm.Moment)
	require.Equal(t, int64(1), b.from, "the id 100 was drawn a millisecond ago")
	b.saw(152, at(151*ms), at(152*ms), rhythm.Moment)
	require.Equal(t, int64(100), b.from)
}

// What a look took by itself while the process stood still does not put off those that come after it: a look that goes along with
// a claim says that it took less.
func TestPlan_ALookThatMetAPauseDoesNotPutOffOthers(t *testing.T) {
	t.Parallel()
	s := quiet("a")
	s.looks.fresh.took = time.Minute
	look, c := &LookForNew{began: noon}, &Claim{}
	c.New = look
	s.Claimed(c, nil, &SeenNew{}, noon, at(ms))
	require.Equal(t, at(ms+livelyHold), s.looks.fresh.at)
	s.ClaimFailed(c, false, at(time.Second))
	require.Zero(t, s.looks.fresh.took, "the next one is sent by itself")
	require.Equal(t, at(time.Second), s.looks.fresh.at)
}

// While looks find something, the next one comes soon. Otherwise they take a part of the time.
func TestPlan_LooksAtWhatIsNewRestWhereThereIsNothing(t *testing.T) {
	t.Parallel()
	s := quiet("a")
	rest := func(took time.Duration, queues ...string) time.Duration {
		s.SawNew(&LookForNew{began: at(-took)}, &SeenNew{Queues: queues}, noon)
		return s.looks.fresh.at.Sub(noon)
	}
	const took = 2 * livelyHold
	for n := range 10 {
		require.Equal(t, min(time.Duration(n+1), rhythm.Fifth)*took, rest(took, "of others"))
	}
	require.Equal(t, took, rest(took, "a"))
	require.True(t, s.Queues[0].next.due)
	require.Equal(t, took, rest(took, "a"), "it is known that it is due")
	require.Equal(t, 2*took, rest(took))
	require.Equal(t, livelyHold, rest(time.Microsecond, "a"))
	s.Queues[0].paused = true
	require.Equal(t, 2*took, rest(took, "a"))
}

// On Citus the ids that were drawn and the jobs are on different servers, so there all looks are at all queues.
func TestPlan_OnCitusNoLooksAtWhatIsNew(t *testing.T) {
	t.Parallel()
	s := quiet("a")
	took := livelyLook
	s.announcement.stir.lively, s.looks.took = true, [2]time.Duration{took, took}
	require.True(t, s.looksAtNew())
	require.Equal(t, rhythm.Twentieth*took, s.lookInterval())
	s.Citus = true
	require.False(t, s.looksAtNew())
	require.Equal(t, rhythm.Fifth*took, s.lookInterval())
}

// How often there is a look at all.
func TestPlan_TimeBetweenLooks(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		what  string
		given func(s *State)
		then  time.Duration
	}{
		{"notifications arrive", func(*State) {}, pollListening},
		{"a look is dear", func(s *State) { s.looks.took = [2]time.Duration{20 * ms, time.Minute} }, 2 * time.Second},
		{"it is very dear", func(s *State) { s.looks.took = [2]time.Duration{time.Minute, time.Minute} }, lookLongest},
		{"none arrive", func(s *State) { s.Confirmed = false }, rhythm.Briefly},
		{"none arrive of transactions", func(s *State) { s.NotOfTx = true }, rhythm.Briefly},
		{"what becomes due is left to others", func(s *State) { s.announcement.leaves = true }, pollLeaving},
		{"but nobody is told that this run waits", func(s *State) { s.announcement.leaves, s.Waits = true, false }, pollListening},
		{"PollInterval", func(s *State) { s.Poll = time.Minute }, time.Minute},
		{"PollInterval, unless looking took the half of it", func(s *State) {
			s.Poll, s.looks.took = ms, [2]time.Duration{time.Second, time.Second}
		}, 2 * time.Second},
		{"lively", func(s *State) { s.announcement.stir.lively = true }, livelyLook},
	} {
		s := quiet("a")
		row.given(s)
		require.Equal(t, row.then, s.lookInterval(), row.what)
	}
}

// Where jobs come often, claims do not wait for a statement that looks at thousands of queues.
func TestPlan_PagesAreSmallWhereJobsComeOften(t *testing.T) {
	t.Parallel()
	l := looks{each: [2]time.Duration{10 * time.Microsecond, ms}}
	require.Equal(t, 2000, l.page(false))
	require.Equal(t, 1000, l.page(true))
	l.fresh.at = noon
	require.Equal(t, 200, l.page(false))
	require.Equal(t, 100, l.page(true))
	require.Equal(t, 1000, (&looks{}).page(true), "it is not known yet what they cost")
}

// Behind a pooler nothing is ever announced, and the time of the next announcement has passed.
func TestPlan_RestsWhileNothingCanBeAnnounced(t *testing.T) {
	t.Parallel()
	s := quiet("a")
	s.Confirmed, s.announcement, s.looks.at = false, announcement{}, at(time.Second)
	require.Equal(t, time.Second, s.upkeep(noon, free), "the next look is what it waits for")
}

// ⚠ While something was paused and the database was away, the claimer's next look at what is paused was overdue and not allowed yet, so
// it thought again at once, all the time.
func TestTrap_ThePlanRestsWhileSomethingIsPausedAndTheDatabaseIsAway(t *testing.T) {
	t.Parallel()
	s := quiet("a")
	s.Confirmed = false
	s.Paused(s.Kinds, map[string]bool{"a": true}, at(-time.Minute))
	s.looks.notAgain = at(time.Second) // as after a look that failed
	require.Equal(t, time.Second, s.upkeep(noon, free))
	require.Empty(t, s.Actions())
}

// A rescan: from the look that says where, to the last page.
func TestPlan_Rescans(t *testing.T) {
	t.Parallel()
	s := quiet("a", "b", "c")
	a, b := s.Queues[0], s.Queues[1]
	step := func(want string) (then Action) {
		if then = s.rescan(noon); want == "" {
			require.Nil(t, then)
		} else {
			require.Equal(t, want, word(then))
		}
		return then
	}
	step("")
	s.rescans.known = time.Time{}
	step("make known")
	s.Known(false, noon)
	step("")
	s.rescans.notYet = noon
	step("make known")
	s.Known(true, noon)
	s.lookedBehind(s.Queues, false, rhythm.Pass{Ended: noon, Took: ms}, outstanding(9))
	turn := step("ask for the turn: a b c").(*AskTurn)
	s.Granted(turn, []*Queue{a, b}, noon)
	glance := step("glance: a b").(*Glance)
	s.Glanced(glance, []*Queue{a, b}, false, ms)
	a.busy = true
	step("")
	require.True(t, a.held, "its answer comes first, and then the rescan")
	a.busy = false
	last := func(q *Queue, priority string, p *Page) {
		page := step("page: " + q.Name + ", priority " + priority).(*RescanPage)
		require.True(t, q.busy && !q.held)
		s.Rescanned(page, p, ms, noon)
		require.False(t, q.busy)
	}
	here := at(-time.Hour)
	last(a, "-1", &Page{Last: &here, LastID: 7, Moved: 1})
	require.True(t, a.next.due, "jobs were brought forward")
	require.Equal(t, cursor.Position{Priority: -1, RunAt: here, ID: 7}, s.rescans.at)
	last(a, "-1", &Page{Lost: suspect(1, 1)})
	last(a, "0", &Page{Left: []string{"y", "x", "y"}})
	last(a, "1", &Page{Lost: suspect(2, 2)})
	require.Equal(t, []int64{1, 2}, a.quarantine.IDs)
	require.Equal(t, noon, a.cursor.Rescanned)
	step("leave to x y: a")
	b.paused = true
	step("")
	require.Empty(t, s.rescans.queues)
	require.Equal(t, 5*ms, s.rescans.pages[0], "the glance and four pages")

	s.rescans.queues, s.rescans.granted, s.rescans.glanced = s.Queues, true, 3
	page := step("page: a, priority -1").(*RescanPage)
	a.moves++
	s.Rescanned(page, &Page{}, ms, noon)
	require.Empty(t, s.rescans.queues, "something was paused or resumed: it ends")
	s.rescans.queues, s.rescans.glanced = s.Queues, 0
	s.Glanced(step("glance: a b c").(*Glance), nil, true, ms)
	require.Empty(t, s.rescans.queues, "it failed")
	s.Granted(turn, nil, at(s.Lease+1))
	require.True(t, s.rescans.known.IsZero(), "somebody may have emptied the table")
}

func TestPlan_TheIntervalOfRescansGrowsWithTheirCost(t *testing.T) {
	t.Parallel()
	var r rescans
	require.Equal(t, rhythm.RescanEvery, r.interval())
	r.looks = [2]time.Duration{time.Second, 20 * ms}
	require.Equal(t, 2*time.Second, r.interval(), "one that was slow may have had to wait for something")
	r.pages = [2]time.Duration{5 * ms, time.Minute}
	require.Equal(t, 2*time.Second, r.interval(), "a page that had to wait, too")
	r.pages = [2]time.Duration{time.Second, 2 * time.Second}
	require.Equal(t, 20*time.Second, r.interval())
}

func TestPlan_RoomForARescan(t *testing.T) {
	t.Parallel()
	q := &Queue{Count: 4, Width: 1}
	for _, row := range []struct {
		room Room
		then bool
	}{
		{Room{}, true},
		{Room{Outstanding: 3}, true}, // one is free
		{Room{Outstanding: 4}, false},
		{Room{Outstanding: 4, Returned: 1}, true}, // one has returned
		{Room{Outstanding: 4, Returned: 1}, false},
	} {
		require.Equal(t, row.then, q.hasRoom(row.room), row)
	}
}
