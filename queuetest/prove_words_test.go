package queuetest

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// Prove knows statements by their texts, so a statement that says something else, or has become a function, is one that it no
// longer knows: it would take a promotion for a step of the handler's, or miss a completion.
func TestProve_KnowsTheStatementsThatThereAre(t *testing.T) {
	t.Parallel()
	all, err := os.ReadFile("../internal/tests/testdata/statements.sql")
	require.NoError(t, err)
	require.Greater(t, len(onceqs), 40)
	for _, o := range onceqs {
		require.Contains(t, string(all), o.part, "no statement of onceq contains what %q is known by", o.words)
	}
}

// A process that claims twice in a row had no lease at the second claim, as on a busy machine, where the first one came before the job
// was let into its lane. A lost connection there ends a Drain, and says nothing of the handler.
func TestPass_AClaimIsMadeWithoutALease(t *testing.T) {
	t.Parallel()
	p := &Process{seen: make(map[string]int)}
	for _, role := range []role{roleClaim, roleClaim, roleCall} {
		_, strike := p.pass([]step{{text: fmt.Sprint(role), role: role, first: true}})
		require.Nil(t, strike)
	}
	require.Equal(t, []bool{false, false, true}, []bool{p.tape[0].leased, p.tape[1].leased, p.tape[2].leased})
	for _, f := range faults(p.tape, true) {
		require.False(t, f.kind == cutting && f.step.role == roleClaim)
	}
}

// A run may get its job by fewer claims than both runs without faults, which accuses no handler. A step of the handler's own that is missed
// does.
func TestJudge_ClaimsThatAreNotMadeAccuseNobody(t *testing.T) {
	t.Parallel()
	for role, accused := range map[role]bool{roleClaim: false, rolePromote: false, roleUser: true, roleCall: true, roleOnceq: true} {
		fourth := &step{text: "a statement", role: role, nth: 4}
		calm := &proofRun{processes: []*Process{{tape: []*step{fourth}}}}
		r := &proofRun{v: &prover{calms: []*proofRun{calm, calm}}, fault: &fault{kind: dying, step: fourth, after: true}, missed: true}
		r.judge()
		require.Equal(t, accused, r.err != nil, fourth.role)
	}
}
