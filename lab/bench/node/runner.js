// Runs one peer that is a Node package: reads a command per line from standard input, answers each with a line of JSON.
//
//	node runner.js graphile-worker|pg-boss|bullmq tuned|default|notify

import { createInterface } from 'node:readline'

const [, , name, settings] = process.argv
const tuned = settings === 'tuned'
const url = process.env.DATABASE_URL
const insertRow = `insert into app_rows (n, note) values ($1, 'written by the application')`
const keyOf = (n) => 'task:' + String(n).padStart(9, '0')
const laneOf = (n, lanes) => 'lane-' + (n % lanes)
const now = () => performance.now()
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))
const range = (from, to) => Array.from({ length: to - from }, (_, i) => from + i)

class NotOffered extends Error {}

// tracker counts jobs as handlers return. wait gives the times, in milliseconds since the start of the worker.
function tracker({ warm, total, limit }) {
  const began = now()
  let done = 0
  let warmAt = null
  let finish
  const finished = new Promise((resolve) => (finish = resolve))
  const timer = setTimeout(() => finish(), limit)
  const ticks = []
  const sampler = setInterval(() => ticks.push({ at: (now() - began) / 1000, done }), 100)
  return {
    count(jobs) {
      done += jobs
      if (warmAt === null && done >= warm) warmAt = now() - began
      if (done >= total) finish()
    },
    async wait() {
      await finished
      const end = now() - began
      clearTimeout(timer)
      clearInterval(sampler)
      return { done: Math.min(done, total), warmAt, end, ticks }
    },
  }
}

// transactions spreads n of them over 8 connections.
async function transactions(pool, first, n, fn) {
  let next = first
  await Promise.all(
    range(0, 8).map(async () => {
      const client = await pool.connect()
      try {
        for (let i = next++; i < first + n; i = next++) {
          await client.query('begin')
          await client.query(insertRow, [i])
          await fn(client, i)
          await client.query('commit')
        }
      } finally {
        client.release()
      }
    }),
  )
}

async function graphile() {
  const { run, makeWorkerUtils, runMigrations, Logger } = await import('graphile-worker')
  const pg = (await import('pg')).default
  const pool = new pg.Pool({ connectionString: url, max: 8 })
  const logger = new Logger(() => () => {})
  await runMigrations({ connectionString: url, logger })
  const utils = await makeWorkerUtils({ pgPool: pool, logger })
  // The settings under which its documentation gives its figures.
  const worker = tuned
    ? { connectionString: url, concurrentJobs: 24, maxPoolSize: 25, localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 }
    : { connectionString: url }
  const start = (noop) => run({ preset: { worker: { ...worker, logger } }, taskList: { noop }, noHandleSignals: true })
  return {
    async fill(from, n, keyed, lanes) {
      for (let i = from; i < from + n; i += 1000) {
        await utils.addJobs(
          range(i, Math.min(i + 1000, from + n)).map((k) => ({
            identifier: 'noop',
            payload: { n: k },
            ...(keyed && { jobKey: keyOf(k) }),
            ...(lanes && { queueName: laneOf(k, lanes) }),
          })),
        )
      }
    },
    transact: (from, n, keyed) =>
      transactions(pool, from, n, (client, i) =>
        keyed
          ? client.query(`select graphile_worker.add_job('noop', $1::json, job_key := $2)`, [{ n: i }, keyOf(i)])
          : client.query(`select graphile_worker.add_job('noop', $1::json)`, [{ n: i }]),
      ),
    async drain(d) {
      if (d.effect === 'row batch') throw new NotOffered()
      const t = tracker(d)
      const runner = await start(async (payload, helpers) => {
        if (d.effect === 'row') await helpers.query(insertRow, [payload.n])
        t.count(1)
      })
      const result = await t.wait()
      runner.stop().catch(() => {})
      return result
    },
    async idle(started) {
      await start(async () => started())
      return (i) => utils.addJob('noop', { n: i })
    },
    async member(did) {
      const runner = await start(async (payload) => did(payload.n))
      return () => runner.stop()
    },
  }
}

async function pgboss() {
  const { PgBoss } = await import('pg-boss')
  const pg = (await import('pg')).default
  const pool = new pg.Pool({ connectionString: url, max: 8 })
  const notify = settings === 'notify'
  const boss = new PgBoss({ connectionString: url, useListenNotify: notify })
  boss.on('error', () => {})
  await boss.start()
  await boss.createQueue('noop', { notify })
  await boss.createQueue('keyed', { policy: 'exclusive' })
  await boss.createQueue('lanes', { policy: 'key_strict_fifo' })
  await boss.createQueue('tenants', { notify })
  const tenant = (id, from, to) => boss.insert('tenants', range(from, to).map((n) => ({ data: { n, tenant: id }, group: { id } })))
  let filled = 'noop'
  return {
    async fillLarge(from, n) {
      for (let i = from; i < from + n; i += 1000) await tenant('large', i, Math.min(i + 1000, from + n))
    },
    // Each worker asks twice a second. Where one job of a tenant may run at once, 100 workers would only ask in vain.
    async tenBehind(each, started) {
      const done = async ([job]) => started(job.data.tenant === 'small')
      await boss.work('tenants', { localConcurrency: each === 1 ? 10 : 100, groupConcurrency: each, pollingIntervalSeconds: 0.5 }, done)
      return () => tenant('small', 0, 10)
    },
    async fill(from, n, keyed, lanes) {
      filled = lanes ? 'lanes' : keyed ? 'keyed' : 'noop'
      for (let i = from; i < from + n; i += 1000) {
        const jobs = range(i, Math.min(i + 1000, from + n)).map((k) => ({
          data: { n: k },
          ...(keyed && { singletonKey: keyOf(k) }),
          ...(lanes && { singletonKey: laneOf(k, lanes) }),
        }))
        await boss.insert(filled, jobs)
      }
    },
    transact: (from, n, keyed) =>
      transactions(pool, from, n, (client, i) =>
        boss.send(keyed ? 'keyed' : 'noop', { n: i }, { db: { executeSql: (text, values) => client.query(text, values) }, ...(keyed && { singletonKey: keyOf(i) }) }),
      ),
    async drain(d) {
      const t = tracker(d)
      if (d.effect === 'row') throw new NotOffered()
      if (d.effect === 'row batch') {
        // fetch, rows and completions of 100 jobs in one transaction, on 4 connections
        let on = true
        const loop = async () => {
          const client = await pool.connect()
          const db = { executeSql: (text, values) => client.query(text, values) }
          while (on) {
            await client.query('begin')
            const jobs = await boss.fetch('noop', { batchSize: 100, db })
            if (jobs.length > 0) {
              await client.query(`insert into app_rows (n, note) select n, 'written by the application' from unnest($1::bigint[]) n`, [jobs.map((j) => j.data.n)])
              await boss.complete('noop', jobs.map((j) => j.id), null, { db })
            }
            await client.query('commit')
            t.count(jobs.length)
            if (jobs.length === 0) await sleep(10)
          }
          client.release()
        }
        const loops = range(0, 4).map(loop)
        const result = await t.wait()
        on = false
        await Promise.all(loops)
        return result
      }
      const options = tuned ? { batchSize: 1000, pollingIntervalSeconds: 0.5, burstWhenBatchFull: true, localConcurrency: 2 } : {}
      await boss.work(filled, options, async (jobs) => t.count(jobs.length))
      return t.wait()
    },
    async idle(started) {
      await boss.work('noop', tuned ? { pollingIntervalSeconds: 0.5 } : {}, async () => started())
      return (i) => boss.send('noop', { n: i })
    },
  }
}

async function bullmq() {
  const { Queue, Worker } = await import('bullmq')
  const { Redis } = await import('ioredis')
  const connection = new Redis({ path: process.env.REDIS_SOCKET, maxRetriesPerRequest: null })
  await connection.flushall()
  const queue = new Queue('bench', { connection, defaultJobOptions: tuned ? { removeOnComplete: true } : {} })
  await queue.waitUntilReady()
  const start = (handler) => new Worker('bench', handler, { connection, ...(tuned && { concurrency: 200 }) })
  return {
    async fill(from, n, keyed) {
      for (let i = from; i < from + n; i += 1000) {
        await queue.addBulk(
          range(i, Math.min(i + 1000, from + n)).map((k) => ({ name: 'noop', data: { n: k }, ...(keyed && { opts: { jobId: keyOf(k).replace(':', '-') } }) })),
        )
      }
    },
    async transact() {
      throw new NotOffered()
    },
    async drain(d) {
      if (d.effect !== '') throw new NotOffered()
      const t = tracker(d)
      start(async () => t.count(1))
      return t.wait()
    },
    async idle(started) {
      start(async () => started())
      return (i) => queue.add('noop', { n: i })
    },
  }
}

const peer = await { 'graphile-worker': graphile, 'pg-boss': pgboss, bullmq }[name]()

const commands = {
  async fill({ from, n, keyed, lanes }) {
    if (lanes && name === 'bullmq') throw new NotOffered()
    const began = now()
    await peer.fill(from, n, keyed, lanes)
    return { took: now() - began }
  },
  async transact({ from, n, how }) {
    if (how === 'keyed, one batch') throw new NotOffered()
    const began = now()
    await peer.transact(from, n, how === 'keyed')
    return { took: now() - began }
  },
  drain: (command) => peer.drain(command),
  async fillLarge({ from, n }) {
    if (!peer.fillLarge) throw new NotOffered()
    const began = now()
    await peer.fillLarge(from, n)
    return { took: now() - began }
  },
  // tenBehind enqueues ten jobs of a small tenant every now and then, and says how long each ten took. The last ten may be not done.
  async tenBehind({ each, gaps, limit, large }) {
    let others = 0
    let left = 0
    let finish = () => {}
    const enqueue = await peer.tenBehind(each, (small) => {
      if (!small) others++
      else if (--left === 0) finish()
    })
    await sleep(1000)
    const times = []
    const first = now()
    const before = others
    const rest = () => first + limit - now()
    for (let i = 0; rest() > 0 && others < large; i++) {
      await sleep(gaps[i % gaps.length])
      left = 10
      const done = new Promise((resolve) => (finish = resolve))
      const began = now()
      await enqueue()
      await Promise.race([done, sleep(Math.max(0, rest()))])
      times.push(now() - began)
    }
    return { times, unfinished: left, rate: ((others - before) * 1000) / (now() - first) }
  },
  async latency({ gaps, limit }) {
    let started
    const enqueue = await peer.idle(() => started(now()))
    await sleep(1000)
    const times = []
    const end = now() + limit
    for (let i = 0; i < gaps.length && now() < end; i++) {
      await sleep(gaps[i])
      const start = new Promise((resolve) => (started = resolve))
      const began = now()
      await enqueue(i)
      const took = (await start) - began
      if (i >= 2) times.push(took)
    }
    return { times }
  },
}

const say = (line) => process.stdout.write(JSON.stringify(line) + '\n')

// member is a worker process among others: it says soon after something happened how many jobs it has done, and when they
// started. What it gives ends it.
async function member({ starts }) {
  let done = 0
  let started = []
  let timer = null
  const tell = () => {
    timer = null
    say({ done, starts: started })
    started = []
  }
  const end = await peer.member((n) => {
    done++
    if (starts) started.push([n, performance.timeOrigin + now()])
    timer ??= setTimeout(tell, started.length > 1 ? 5 : 0)
  })
  say({ working: true })
  return end
}

say({ ready: true })
let end = () => {}
for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line)
  if (command.cmd === 'member') {
    end = await member(command)
    continue
  }
  let answer
  try {
    answer = await commands[command.cmd](command)
  } catch (err) {
    answer = { notOffered: err instanceof NotOffered, error: String(err?.stack ?? err) }
  }
  say(answer)
}
await end()
process.exit(0)
