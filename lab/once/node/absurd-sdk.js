// absurd: a job is a task, what a handler writes or calls is a step, a key is an idempotency key. A delay is a sleep at the
// start of the task. A task that waits for others is in a queue of its own, as absurd asks.

import { readdirSync, readFileSync } from 'node:fs'
import { Absurd } from 'absurd-sdk'
import { serve, pool, insertRow, noRate, Missing } from './serve.js'

const log = { log() {}, info() {}, warn() {}, error() {} }
const queues = ['default', 'moved', 'groups']
const clients = Object.fromEntries(queues.map((queueName) => [queueName, new Absurd({ db: pool, queueName, log })]))

serve({
  async setup() {
    const folder = process.env.ONCEQ_ONCE_SQL
    const file = readdirSync(folder).find((name) => name.startsWith('absurd-'))
    await pool.query(readFileSync(`${folder}/${file}`, 'utf8'))
    for (const queue of queues) await clients[queue].createQueue(queue, { cleanupTtl: '50 years' })
  },
  async enqueue(jobs, tx) {
    const answers = []
    for (const j of jobs) {
      if (j.lane || j.limit) throw new Missing('it has no order or limit over several processes')
      if (j.rate) throw new Missing(noRate)
      if (j.life === 'done') throw new Missing('a key is taken as long as its task is stored')
      const queue = j.group ? 'groups' : j.queue || 'default'
      const app = tx ? clients[queue].bindToConnection(tx) : clients[queue]
      const { taskID, created } = await app.spawn(
        j.kind || 'work',
        { n: j.n, delay: j.delay, after: j.group && answers.map((answer) => answer.id.split('/')[1]) },
        { queue, maxAttempts: j.attempts, retryStrategy: { kind: 'fixed', baseSeconds: 0.05 }, idempotencyKey: j.key },
      )
      const answer = { id: `${queue}/${taskID}`, duplicate: !created }
      if (!created) {
        const { state, result } = await app.fetchTaskResult(taskID)
        Object.assign(answer, { state: state === 'failed' ? 'dead' : state, result: result ?? undefined })
      }
      answers.push(answer)
    }
    return answers
  },
  async work(crew, handle) {
    if (crew.every) throw new Missing('it has no scheduler; its documentation has a recipe with keys')
    const task = (kind) => async (params, ctx) => {
      if (params.delay) await ctx.sleepFor('delay', params.delay / 1000)
      for (const id of params.after ?? []) await ctx.awaitTaskResult(id, { queue: 'default' })
      const beat = kind === 'long' && setInterval(() => ctx.heartbeat().catch(() => {}), 3_000)
      try {
        return await handle({
          n: params.n,
          attempt: 1, // it does not say
          write: (n) => ctx.step('write', async () => (await pool.query(insertRow, [n])).rowCount),
          call: (what, fn) => ctx.step(what, () => fn(`${ctx.taskID}:${what}`)),
        })
      } finally {
        clearInterval(beat)
      }
    }
    // A task that a worker does not know is put off by 15 to 30 seconds, again and again. No setting shortens that.
    const soon = `update absurd.r_default set available_at = absurd.current_time()
      where state = 'sleeping' and available_at between absurd.current_time() + interval '5 s' and absurd.current_time() + interval '30 s'`
    setInterval(() => pool.query(soon).catch(() => {}), 1_000)
    const workers = []
    for (const queue of [...crew.queues, 'groups']) {
      for (const name of crew.kinds) clients[queue].registerTask({ name }, task(name))
      workers.push(await clients[queue].startWorker({ concurrency: crew.at_once, claimTimeout: 10, onError() {} }))
    }
    return () => Promise.race([Promise.all(workers.map((w) => w.close())), new Promise((resolve) => setTimeout(resolve, crew.stop_within))])
  },
  async left() {
    const unfinished = queues.map((queue) => `select 1 from absurd.t_${queue} where state not in ('completed', 'failed', 'cancelled')`)
    const { rows } = await pool.query(`select count(*)::int as n from (${unfinished.join(' union all ')}) as tasks`)
    return rows[0].n
  },
  silence: async () => {}, // a claim holds for ten seconds
  async age() {
    for (const queue of queues) {
      await pool.query(`update absurd.r_${queue} set completed_at = completed_at - interval '30 days', failed_at = failed_at - interval '30 days'`)
      await pool.query(`update absurd.t_${queue} set cancelled_at = cancelled_at - interval '30 days'`)
    }
    await pool.query('select absurd.cleanup_all_queues()')
  },
  async cancel(id) {
    const [queue, task] = id.split('/')
    await clients[queue].cancelTask(task)
    const { state } = await clients[queue].fetchTaskResult(task)
    if (state !== 'cancelled') throw new Error(`not cancelled: it is ${state}`)
  },
})
