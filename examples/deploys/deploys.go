// Package deploys is the code of docs/run/deploys.md: what may change between two versions of an application.
package deploys

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// Charge is the payload. A later version added Currency: older jobs do not have it.
type Charge struct {
	Order    int    `json:"order"`
	Cents    int    `json:"cents"`
	Currency string `json:"currency,omitempty"`
}

// Charges compares only the fields that were there from the start, so an older key still names the same work.
var Charges = onceq.Kind[Charge]{
	Name:   "charge",
	Key:    func(c Charge) string { return fmt.Sprint("charge:", c.Order) },
	Fields: []string{"order", "cents"},

	RefuseUnknownFields: true, // the next version's jobs wait for the next version's workers
}

// ChargesV2 has a payload with another meaning, so it has a name of its own. It keeps the scope, and therefore the keys. An
// order that the first kind has, or had within the window, is a mismatch and is not charged again.
var ChargesV2 = onceq.Kind[ChargeV2]{
	Name:  "charge_v2",
	Key:   func(c ChargeV2) string { return fmt.Sprint("charge:", c.Order) },
	Scope: func(ChargeV2) string { return "charge" },
}

// ChargeV2 is the new payload.
type ChargeV2 struct {
	Order  int    `json:"order"`
	Amount string `json:"amount"`
}

// Handlers serves both kinds as long as there are jobs of the first.
func Handlers() []onceq.Handler {
	return []onceq.Handler{
		Charges.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, c Charge) error {
			if c.Currency == "" {
				c.Currency = "EUR"
			}
			return charge(ctx, tx, ChargeV2{c.Order, fmt.Sprintf("%d.%02d %s", c.Cents/100, c.Cents%100, c.Currency)})
		}),
		ChargesV2.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, c ChargeV2) error { return charge(ctx, tx, c) }),
	}
}

// CheckBacklog is run by the new version before it is deployed: charges check-backlog. It runs no job. An error stops the deploy.
// elsewhere names the kinds that other programs run in the same tables.
func CheckBacklog(ctx context.Context, q *onceq.Queue, elsewhere ...string) error {
	kinds, err := onceqops.New(q).CheckPayloads(ctx, Handlers()...)
	for _, k := range kinds {
		fmt.Println(k)
		if k.Failed > 0 || k.NoHandler && !slices.Contains(elsewhere, k.Kind) {
			err = errors.Join(err, fmt.Errorf("this version cannot run the jobs of kind %q that are waiting", k.Kind))
		}
	}
	return err
}

func charge(ctx context.Context, tx pgx.Tx, c ChargeV2) error {
	_, err := tx.Exec(ctx, `insert into charges values ($1, $2)`, c.Order, c.Amount)
	return err
}
