"""Takes orders, and enqueues the charge of each in the same transaction: python3 orders.py 1 100 takes those from 1 to 100.

The handler is in Go.
"""
import json
import os
import sys

import psycopg2

conn = psycopg2.connect(os.environ["DATABASE_URL"])
for order in range(int(sys.argv[1]), int(sys.argv[2]) + 1):
    with conn, conn.cursor() as cur:  # commits, or rolls back after an exception
        cur.execute("insert into orders (id) values (%s) on conflict do nothing", (order,))
        cur.execute(
            "select id, duplicate, state from onceq.enqueue(%s, %s, %s)",
            ("charge", json.dumps({"amount": order * 10, "order": order}), f"order {order}"),
        )
        job, duplicate, state = cur.fetchone()
    print(order, job, "duplicate" if duplicate else "new", flush=True)
conn.close()
