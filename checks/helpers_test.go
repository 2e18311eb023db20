package checks

import (
	"github.com/jackc/pgx/v5/pgxpool"
)

func manyConnections(c *pgxpool.Config) { c.MaxConns = 12 }
