// Package citus is what a server with Citus gets in place of some statements. It imports pg, reap, stmt and
// table, and is imported where a Queue is made.
package citus

import (
	"context"
	"slices"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/reap"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Citus sends a statement whole to the node that has the schema's tables, if it has no insert in a "with", no
// sequence and, where it inserts what it selects, no function that is not immutable. Otherwise it takes the
// statement apart itself, in ways that are slow, that need a two-phase commit, or that it does not know. The
// statements of the library that are not so are sent there in other words (internal/stmt/citus.go). What
// these have in common:
//
//   - The sequence is on the coordinator, so ids are drawn first, by a statement that names no table. EnqueueInBatch, which cannot wait
//     for an answer, sends parts.
//   - "from onceq.meta" says where an insert belongs. The table has one row.
//   - Plans are not generic: for one Citus says "could not create distributed plan", or ends with a segmentation fault.
//   - Nobody is notified. A notification from the node does not reach those who listen on the coordinator. Workers poll.
//
// TestCitus_ runs these on a plain server, in make matrix MODES=citus on a cluster.

// drawnAs has what is sent in place of statements that need what the sequence says, which is on the
// coordinator.
var drawnAs = map[string]string{
	stmt.InsertKeyed: stmt.EnqueueOneDrawn, stmt.EnqueueOne: stmt.EnqueueOneDrawn, stmt.EnqueueJobs: stmt.EnqueueDrawn,
	stmt.InsertFence: stmt.ClaimFenceDrawn, stmt.TakeFence: stmt.ClaimFenceDrawn, stmt.ReadRefs: stmt.RefsApart,
}

// Parts is the pg.Parts for Citus.
type Parts struct{}

// Draws says that a statement needs what the sequence says.
func (Parts) Draws(statement string) bool { return drawnAs[statement] != "" }

// OnNode makes a call of a function a query on a table, which goes to that table's node, in transactions too.
// A call alone would run on the coordinator in a transaction, and each of its steps would be a hop.
func (Parts) OnNode(statement string) string {
	switch statement {
	case stmt.FinishJobs, stmt.GiveBackJobs, stmt.CancelJobs, stmt.CancelDead, table.HurryJobs,
		stmt.ReplaceJobs, stmt.RedriveJobs, table.DiscardJobs, stmt.EmitEvent, stmt.BeginAwait,
		stmt.PromoteLines, stmt.CallFamilies, stmt.SettleLimits, stmt.TakeSlots, stmt.SetLimit,
		stmt.InsertMembers, stmt.SweepMembers, stmt.TellMembers, stmt.EnqueueDrawn, reap.CallLines,
		stmt.RequestCancels, table.MoveJobs, stmt.PauseIt, stmt.ResumeIt, stmt.WritePresence,
		stmt.WriteCounts, stmt.RescanTurn, stmt.ResolveFence, table.ResolveEffects:
		return statement + ", onceq.meta"
	case reap.ReadFences:
		return stmt.ClusterSize
	}
	return statement
}

// Draw asks the sequence for what such a statement needs, and returns what is sent in its place.
func (Parts) Draw(ctx context.Context, q *pg.Store, db pg.DB, statement string, args []any) (string, []any, error) {
	instead := drawnAs[statement]
	var ids []int64
	ask, n, answer := stmt.DrawIDs, []any{1}, pg.Row(nil, &ids)
	switch statement {
	case stmt.EnqueueJobs:
		n[0] = len(args[1].([]string))
	case stmt.ReadRefs:
		ids = make([]int64, 1)
		ask, n, answer = stmt.ReadSequence, nil, pg.Row(&ids[0])
	}
	if err := pg.Query(ctx, db, q.SQL(ask), n, answer); err != nil {
		return instead, nil, err
	}
	args = slices.Clone(args)
	switch statement {
	case stmt.InsertKeyed: // has nine arguments, where stmt.EnqueueOne has eighteen
		args = append(args, make([]any, 18-len(args))...)
	case stmt.InsertFence: // has no token to take over
		args = append(args, nil, false, "", false)
	case stmt.EnqueueJobs:
		slices.Sort(ids)
		for i, id := range args[5].([]int64) { // some have ids already
			if id != 0 {
				ids[i] = id
			}
		}
		args[5] = ids
		return instead, args, nil
	}
	return instead, append(args, ids[0]), nil
}
