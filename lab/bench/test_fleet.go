package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// fleetTrials run many worker processes over one database, each with a pool of its own.
func fleetTrials(b *bench) []trial {
	var trials []trial
	for _, n := range b.sizes.fleet {
		for _, p := range b.fleetPeers(n, true) {
			trials = append(trials, b.fleetDrain(p, drainBy(n), n, 0))
		}
	}
	for _, p := range b.fleetPeers(b.sizes.beside, true) {
		if p.name == "graphile-worker" {
			continue // has no queues that a worker chooses among
		}
		trials = append(trials, b.fleetDrain(p, drainBy(b.sizes.busy), b.sizes.busy, 0),
			b.fleetDrain(p, besideName(b.sizes), b.sizes.busy, b.sizes.beside))
	}
	for _, n := range b.sizes.idlers {
		for _, p := range b.fleetPeers(n, false) {
			trials = append(trials, trial{
				test: "fleet", variant: idleName(n), peer: p, counted: true,
				measure: func(ctx context.Context, r *room) ([]figure, error) {
					o, err := r.observe(ctx)
					if err != nil {
						return nil, err
					}
					defer o.close()
					ms, err := r.join(ctx, n, order{}, nil)
					if err != nil {
						return nil, err
					}
					defer ms.stop()
					if err := pause(ctx, settled(n)+b.sizes.rest); err != nil {
						return nil, err
					}
					rate, err := o.rate(ctx, b.sizes.idle)
					if err != nil {
						return nil, err
					}
					connections, err := o.connections(ctx)
					return []figure{
						{variant: idleName(n) + statementsName, unit: "a second", value: rate},
						{variant: idleName(n) + connectionsName, unit: "count", value: float64(connections)},
					}, err
				},
			})
		}
	}
	n := b.sizes.fleet[len(b.sizes.fleet)-1]
	for _, p := range b.fleetPeers(n, true) {
		trials = append(trials, trial{
			test: "fleet", variant: steadyName(n), peer: p, conns: producers,
			measure: func(ctx context.Context, r *room) ([]figure, error) {
				return r.steadyLatency(ctx, steadyName(n), n, order{}, 1000, b.sizes.loaded, func(ctx context.Context, n int) error {
					return r.session.(enqueuer).put(ctx, nil, n, false)
				})
			},
		})
		if p.name == "graphile-worker" {
			continue
		}
		trials = append(trials, trial{
			test: "fleet", variant: steadyInTxName(n), peer: p, conns: producers,
			measure: func(ctx context.Context, r *room) ([]figure, error) {
				return r.steadyLatency(ctx, steadyInTxName(n), n, order{}, 1000, b.sizes.loaded, func(ctx context.Context, n int) error {
					s := r.session.(*goSession)
					return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error { return s.put(ctx, tx, n, false) })
				})
			},
		})
	}
	return trials
}

// What is measured of a variant beside its rate or latency.
const (
	leastName       = ": least of them"
	statementsName  = ": statements"
	connectionsName = ": connections"
	cpuName         = ": CPU of process and server"
	goneName        = ": statements until it is gone"
)

// evenShare is the unit of what a process did of its n-th part.
const evenShare = "of an even share"

func drainBy(n int) string    { return fmt.Sprintf("drain by %d", n) }
func steadyName(n int) string { return fmt.Sprintf("1,000 jobs/s over %d", n) }
func steadyInTxName(n int) string {
	return fmt.Sprintf("1,000 jobs/s in transactions over %d", n)
}
func besideName(s sizes) string { return fmt.Sprintf("drain by %d beside %d idle", s.busy, s.beside) }

func idleName(n int) string {
	if n == 1 {
		return "1 idle process"
	}
	return fmt.Sprintf("%d idle processes", n)
}

// maxNode is how many processes of Node fit into the memory of a small machine.
const maxNode = 40

// fleetPeers are those that can work in n processes at once; of graphile-worker's settings those for work, or those for
// being idle.
func (b *bench) fleetPeers(n int, work bool) []peer {
	var peers []peer
	for _, p := range b.peers {
		switch p.name {
		case "onceq", "River":
			peers = append(peers, p)
		case "graphile-worker":
			if n <= maxNode && work == (p.settings == "tuned") {
				peers = append(peers, p)
			}
		}
	}
	return peers
}

// fleetDrain works off a backlog by n processes. The others serve another queue, in which there is nothing.
func (b *bench) fleetDrain(p peer, variant string, n, others int) trial {
	jobs := b.sizes.growth
	return trial{
		test: "fleet", variant: variant, peer: p,
		prepare: func(ctx context.Context, r *room) error {
			_, err := r.fill(ctx, jobs, false)
			return err
		},
		measure: func(ctx context.Context, r *room) ([]figure, error) {
			if others > 0 {
				idle, err := r.join(ctx, others, order{Queues: []string{"quiet"}}, nil)
				if err != nil {
					return nil, err
				}
				defer idle.stop()
				if err := pause(ctx, settled(others)); err != nil {
					return nil, err
				}
			}
			t := newTracker(drain{warm: jobs / 5, total: jobs, limit: b.sizes.limit, more: true})
			ms, err := r.join(ctx, n, order{}, func(_ said, jobs int) { t.count(jobs) })
			if err != nil {
				return nil, err
			}
			s, err := t.wait(ctx, ms.stop)
			if err != nil {
				return nil, err
			}
			if err := ms.err(); err != nil {
				return nil, err
			}
			figures := []figure{{variant: variant, unit: "jobs/s", value: s.rate()}}
			if n > 1 {
				least, sum := ms.done[0].Load(), int64(0)
				for i := range ms.done {
					least, sum = min(least, ms.done[i].Load()), sum+ms.done[i].Load()
				}
				figures = append(figures, figure{variant: variant + leastName, unit: evenShare, value: float64(least) * float64(n) / float64(sum)})
			}
			return figures, nil
		},
	}
}
