// The side of the protocol that every adapter in Node shares; ../README.md describes it, and ../serve.go is the same in Go.

import { createInterface } from 'node:readline'
import pg from 'pg'

export const url = process.env.ONCEQ_ONCE_DATABASE_URL
export const insertRow = 'insert into app_rows (n) values ($1)'
export const pool = new pg.Pool({ connectionString: url, max: 10 })
pool.on('error', () => {})

// noRate is what most systems have of a job's rate.
export const noRate = 'it has no rate over several processes'

// Missing says that a system has no such thing, in a sentence for the table.
export class Missing extends Error {}

// serve runs an adapter: { noTransactions, setup, enqueue(jobs, tx), work(crew, handle), left, silence, age, cancel(id) }. tx is
// a client of pg, or undefined. work returns what stops the worker.
export function serve(adapter) {
  const transactions = new Map()
  const runs = new Map()
  let last = 0
  let stop = async () => {}
  const tell = (message) => process.stdout.write(JSON.stringify(message) + '\n')

  // handle is every handler: it does what the story says, step by step, and ends with the first error. run is
  // { n, attempt, write(n), call(name, fn), end() }. What it returns is the job's result.
  const handle = async (run) => {
    const id = ++last
    const steps = []
    let wake = () => {}
    const me = { step: (c) => (steps.push(c), wake()), answered: () => {} }
    runs.set(id, me)
    tell({ event: 'started', run: id, n: run.n, attempt: run.attempt })
    try {
      for (;;) {
        while (steps.length === 0) await new Promise((resolve) => (wake = resolve))
        const c = steps.shift()
        try {
          if (c.do === 'write') await run.write(c.n)
          if (c.do === 'end') {
            if (!run.end) throw new Missing("a handler has no transaction of the queue's")
            await run.end()
          }
          if (c.do === 'call') {
            await run.call(c.name, async (key) => {
              const answer = new Promise((resolve) => (me.answered = resolve))
              tell({ event: 'called', run: id, name: c.name, key })
              const { bad } = await answer
              if (bad) throw new Error(bad)
              return 'receipt'
            })
          }
        } catch (err) {
          if (err instanceof Missing) {
            tell({ id: c.id, missing: err.message })
            continue
          }
          tell({ id: c.id, error: String(err.message) })
          throw err
        }
        tell({ id: c.id })
        if (c.do === 'finish') return c.name
        if (c.do === 'fail') throw new Error('the story lets this attempt fail')
      }
    } finally {
      runs.delete(id)
      for (const c of steps) tell({ id: c.id, ended: true })
    }
  }

  const commands = {
    setup: () => adapter.setup(),
    async begin({ tx }) {
      if (adapter.noTransactions) throw new Missing(adapter.noTransactions)
      const client = await pool.connect()
      client.on('error', () => {})
      transactions.set(tx, client)
      await client.query('begin')
    },
    row: ({ tx, n }) => (transactions.get(tx) ?? pool).query(insertRow, [n]).then(() => {}),
    enqueue: async ({ tx, jobs }) => ({ answers: await adapter.enqueue(jobs, transactions.get(tx)) }),
    commit: async ({ tx }) => {
      const { command } = await transactions.get(tx).query('commit')
      if (command !== 'COMMIT') throw new Error('the transaction was rolled back')
    },
    rollback: ({ tx }) => transactions.get(tx).query('rollback').then(() => {}),
    async work({ crew }) {
      stop = await adapter.work({ kinds: ['work'], queues: ['default'], ...crew }, handle)
    },
    stop: () => stop(),
    left: async () => ({ left: await adapter.left() }),
    silence: () => adapter.silence(),
    age: () => adapter.age(),
    cancel: ({ name }) => adapter.cancel(name),
  }

  createInterface({ input: process.stdin })
    .on('line', async (line) => {
      const c = JSON.parse(line)
      if (c.run) {
        const run = runs.get(c.run)
        if (!run) return tell({ id: c.id, ended: true })
        if (c.do !== 'called') return run.step(c)
        run.answered(c)
        return tell({ id: c.id })
      }
      try {
        tell({ id: c.id, ...(await commands[c.do](c)) })
      } catch (err) {
        tell(err instanceof Missing ? { id: c.id, missing: err.message } : { id: c.id, error: String(err.message) })
      }
    })
    .on('close', () => process.exit(0))
  tell({ event: 'ready' })
}
