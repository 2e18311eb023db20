package prove_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/prove"
	"github.com/onceq/onceq/queuetest"
)

func TestHandler_ChargesOnce(t *testing.T) {
	t.Parallel()
	queuetest.Prove(t, queuetest.Proof{
		Setup:   queuetest.SQL(`create table charges (order_id int, cents int)`),
		Job:     func() onceq.Job { return prove.Charge.Job(prove.Order{ID: 7, Cents: 4200}) },
		Handler: func(p *queuetest.Process) onceq.Handler { return prove.Handler(p.Client) },
		Check: func(o *queuetest.Outcome) {
			require.Len(o, o.Effects, 1)
			require.Equal(o, 1, o.Count(`select count(*) from charges where order_id = 7 and cents = 4200`))
		},
	})
}
