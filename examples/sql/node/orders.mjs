// Takes orders, and enqueues the charge of each in the same transaction: node orders.mjs 1 100 takes those from 1 to 100.
// The handler is in Go.
import pg from 'pg';

const [from, to] = process.argv.slice(2).map(Number);
const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
await client.connect();
for (let order = from; order <= to; order++) {
  await client.query('begin');
  await client.query('insert into orders (id) values ($1) on conflict do nothing', [order]);
  const { rows } = await client.query('select id, duplicate, state from onceq.enqueue($1, $2, $3)', [
    'charge', JSON.stringify({ order, amount: order * 10 }), `order ${order}`]);
  await client.query('commit');
  console.log(order, rows[0].id, rows[0].duplicate ? 'duplicate' : 'new');
}
await client.end();
