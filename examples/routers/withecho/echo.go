// Package withecho serves the shop with echo, version 5.
package withecho

import (
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/labstack/echo/v5"
	"github.com/labstack/echo/v5/middleware"

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
	e := echo.New()
	e.Use(middleware.Recover())
	e.POST("/orders", onceTx(m, pool, func(c *echo.Context, tx pgx.Tx) error {
		var order routers.Order
		if err := c.Bind(&order); err != nil {
			return err
		}
		if err := shop.Place(c.Request().Context(), tx, &order); err != nil {
			return err
		}
		return c.JSON(http.StatusCreated, order)
	}))
	e.POST("/orders/:id/charges", func(c *echo.Context) error {
		charge, err := shop.Charge(c.Request().Context(), c.Param("id"))
		if err != nil {
			return failure(err)
		}
		return c.JSON(http.StatusCreated, charge)
	}, once(m))
	e.POST("/orders/:id/refunds", func(c *echo.Context) error {
		if err := shop.Refund(c.Request().Context(), c.Param("id")); err != nil {
			return failure(err)
		}
		return c.NoContent(http.StatusNoContent)
	}, once(m))
	return e, nil
}

func failure(err error) error {
	if errors.Is(err, routers.ErrNoOrder) {
		return echo.NewHTTPError(http.StatusNotFound, err.Error())
	}
	return echo.NewHTTPError(http.StatusBadGateway, "it did not work")
}

// once is Middleware.Handler for echo. Do not use echo.WrapMiddleware for it: answers would be lost. Echo answers an error
// after all middleware has returned, and a panic through the context, where WrapMiddleware leaves the handler's writer.
func once(m *onceqhttp.Middleware) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c *echo.Context) error {
			m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer in(c, w, r)()
				if err := next(c); err != nil {
					c.Echo().HTTPErrorHandler(c, err)
				}
			})).ServeHTTP(c.Response(), c.Request())
			return nil
		}
	}
}

// onceTx is Middleware.HandlerTx for echo. An error with a status below 500 is an answer: it is stored, and what the
// handler wrote commits with it. Any other error rolls back.
func onceTx(m *onceqhttp.Middleware, pool *pgxpool.Pool, h func(*echo.Context, pgx.Tx) error) echo.HandlerFunc {
	return func(c *echo.Context) error {
		m.HandlerTx(pool, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			defer in(c, w, r)()
			err := h(c, tx)
			var answer echo.HTTPStatusCoder
			if errors.As(err, &answer) && answer.StatusCode() < http.StatusInternalServerError {
				c.Echo().HTTPErrorHandler(c, err)
				return nil
			}
			return err
		}).ServeHTTP(c.Response(), c.Request())
		return nil
	}
}

// in makes c work on w and r until the returned function is called. That must happen after a panic too, because code that
// recovers answers through c.
func in(c *echo.Context, w http.ResponseWriter, r *http.Request) (restore func()) {
	response, request := c.Response(), c.Request()
	c.SetResponse(echo.NewResponse(w, c.Logger()))
	c.SetRequest(r)
	return func() {
		c.SetResponse(response)
		c.SetRequest(request)
	}
}
