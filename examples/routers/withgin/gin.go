// Package withgin serves the shop with gin.
package withgin

import (
	"errors"
	"net/http"

	"github.com/gin-gonic/gin"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/routers"
	"github.com/onceq/onceq/onceqhttp"
)

// New returns the shop's handler.
func New(pool *pgxpool.Pool, q *onceq.Queue, shop routers.Shop) (http.Handler, error) {
	m, err := onceqhttp.New(q, onceqhttp.Config{Principal: routers.User})
	if err != nil {
		return nil, err
	}
	e := gin.New()
	e.Use(gin.Recovery())
	e.POST("/orders", onceTx(m, pool, func(c *gin.Context, tx pgx.Tx) error {
		var order routers.Order
		if err := c.BindJSON(&order); err != nil {
			return nil // it has answered with 400
		}
		if err := shop.Place(c.Request.Context(), tx, &order); err != nil {
			return err
		}
		c.JSON(http.StatusCreated, order)
		return nil
	}))
	e.POST("/orders/:id/charges", once(m), func(c *gin.Context) {
		charge, err := shop.Charge(c.Request.Context(), c.Param("id"))
		if !failed(c, err) {
			c.JSON(http.StatusCreated, charge)
		}
	})
	e.POST("/orders/:id/refunds", once(m), func(c *gin.Context) {
		if err := shop.Refund(c.Request.Context(), c.Param("id")); !failed(c, err) {
			c.Status(http.StatusNoContent)
		}
	})
	return e, nil
}

func failed(c *gin.Context, err error) bool {
	switch {
	case err == nil:
		return false
	case errors.Is(err, routers.ErrNoOrder):
		c.AbortWithStatusJSON(http.StatusNotFound, gin.H{"error": err.Error()})
	default:
		c.AbortWithStatusJSON(http.StatusBadGateway, gin.H{"error": "it did not work"})
	}
	return true
}

// once is Middleware.Handler for gin. The handlers that follow it in the route run once.
func once(m *onceqhttp.Middleware) gin.HandlerFunc {
	return func(c *gin.Context) {
		c.Request.Pattern = c.FullPath()
		m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			answer, restore := in(c, w, r)
			defer restore()
			c.Next()
			answer.WriteHeaderNow()
		})).ServeHTTP(c.Writer, c.Request)
		c.Abort() // if the handlers did not run
	}
}

// onceTx is Middleware.HandlerTx for gin.
func onceTx(m *onceqhttp.Middleware, pool *pgxpool.Pool, h func(*gin.Context, pgx.Tx) error) gin.HandlerFunc {
	return func(c *gin.Context) {
		c.Request.Pattern = c.FullPath()
		m.HandlerTx(pool, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			answer, restore := in(c, w, r)
			defer restore()
			err := h(c, tx)
			if err == nil {
				answer.WriteHeaderNow()
			}
			return err
		}).ServeHTTP(c.Writer, c.Request)
	}
}

// in makes c work on w and r until restore is called. That must happen after a panic too, because code that recovers
// answers through c.
func in(c *gin.Context, w http.ResponseWriter, r *http.Request) (answer *writer, restore func()) {
	outer, request := c.Writer, c.Request
	answer = &writer{ResponseWriter: outer, to: w, status: http.StatusOK, size: -1}
	c.Writer, c.Request = answer, r
	return answer, func() { c.Writer, c.Request = outer, request }
}
