// Package withchi serves the shop with chi, whose handlers and middleware are those of net/http.
package withchi

import (
	"encoding/json"
	"errors"
	"net/http"

	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/routers"
	"github.com/onceq/onceq/onceqhttp"
)

// New returns the shop's handler. With puts the middleware behind the router. Use would run it before the router, when the
// route is not known yet.
func New(pool *pgxpool.Pool, q *onceq.Queue, shop routers.Shop) (http.Handler, error) {
	m, err := onceqhttp.New(q, onceqhttp.Config{Principal: routers.User})
	if err != nil {
		return nil, err
	}
	root := chi.NewRouter()
	root.Use(middleware.Recoverer)
	root.Route("/orders", func(r chi.Router) {
		r.Method("POST", "/", m.HandlerTx(pool, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			var order routers.Order
			if err := json.NewDecoder(r.Body).Decode(&order); err != nil {
				http.Error(w, "no order", http.StatusBadRequest)
				return nil
			}
			if err := shop.Place(r.Context(), tx, &order); err != nil {
				return err
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			return json.NewEncoder(w).Encode(order)
		}))
		r.With(m.Handler).Post("/{id}/charges", func(w http.ResponseWriter, r *http.Request) {
			charge, err := shop.Charge(r.Context(), chi.URLParam(r, "id"))
			if failed(w, err) {
				return
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			_ = json.NewEncoder(w).Encode(charge)
		})
		r.With(m.Handler).Post("/{id}/refunds", func(w http.ResponseWriter, r *http.Request) {
			if err := shop.Refund(r.Context(), chi.URLParam(r, "id")); !failed(w, err) {
				w.WriteHeader(http.StatusNoContent)
			}
		})
	})
	return root, nil
}

func failed(w http.ResponseWriter, err error) bool {
	switch {
	case err == nil:
		return false
	case errors.Is(err, routers.ErrNoOrder):
		http.Error(w, err.Error(), http.StatusNotFound)
	default:
		http.Error(w, "it did not work", http.StatusBadGateway)
	}
	return true
}
