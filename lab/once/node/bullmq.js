// BullMQ with deduplication by id, and a job id for keys that are taken for ever. Finished jobs stay, which is its default.

import { FlowProducer, Queue, Worker } from 'bullmq'
import { Redis } from 'ioredis'
import { serve, pool, insertRow, Missing } from './serve.js'

const connection = new Redis({ path: process.env.ONCEQ_ONCE_REDIS, maxRetriesPerRequest: null })
const open = new Map()
const queue = (name) => {
  if (!open.has(name)) open.set(name, new Queue(name, { connection }))
  return open.get(name)
}
const names = ['default', 'moved', 'limited', 'rated']

function optionsOf(j) {
  const opts = { attempts: j.attempts || 25, backoff: 50 }
  if (j.delay) opts.delay = j.delay
  if (j.life === 'done') opts.deduplication = { id: j.key, keepLastIfActive: true }
  if (j.life === 'day') opts.deduplication = { id: j.key, ttl: 86_400_000 }
  if (j.life === 'ever') opts.jobId = j.key
  return opts
}

serve({
  noTransactions: "its jobs are in Redis, in no transaction with the application's rows",
  setup: async () => {},
  async enqueue(jobs) {
    const last = jobs.at(-1)
    if (last.lane) throw new Missing('groups are in BullMQ Pro, which is paid')
    if (last.group) {
      const { job } = await new FlowProducer({ connection }).add({
        name: 'work',
        queueName: 'default',
        data: { n: last.n },
        opts: optionsOf(last),
        children: jobs.slice(0, -1).map((j) => ({
          name: 'work', queueName: 'default', data: { n: j.n }, opts: { ...optionsOf(j), failParentOnFailure: true },
        })),
      })
      return [{ id: job.id }]
    }
    const name = last.limit ? 'limited' : last.rate ? 'rated' : last.queue || 'default'
    if (last.limit) await queue(name).setGlobalConcurrency(2)
    const added = await queue(name).addBulk(jobs.map((j) => ({ name: j.kind || 'work', data: { n: j.n }, opts: optionsOf(j) })))
    return added.map((job) => ({ id: job.id }))
  },
  async work(crew, handle) {
    const workers = [...crew.queues, 'limited', 'rated'].map(
      (name) =>
        new Worker(
          name,
          (job) => {
            if (!crew.kinds.includes(job.name)) throw new Error(`no handler for ${job.name}`)
            return handle({
              n: job.data.n,
              attempt: job.attemptsMade + 1,
              write: (n) => pool.query(insertRow, [n]),
              call: (what, fn) => fn(`bullmq-${job.id}-${what}`),
            })
          },
          { connection: connection.duplicate(), concurrency: crew.at_once, lockDuration: 10_000, stalledInterval: 5_000,
            ...(name === 'rated' && { limiter: { max: 4, duration: 3_000 } }) },
        ),
    )
    if (crew.every && !(await queue('default').getJobScheduler('tick'))) await queue('default').upsertJobScheduler('tick', { pattern: `*/${crew.every} * * * * *` }, { name: 'work', data: { n: 1 } })
    for (const worker of workers) worker.on('error', () => {})
    return () => Promise.race([Promise.all(workers.map((w) => w.close())), new Promise((resolve) => setTimeout(resolve, crew.stop_within))])
  },
  async left() {
    let n = 0
    for (const name of names) {
      const counts = await queue(name).getJobCounts('waiting', 'active', 'delayed', 'prioritized', 'waiting-children')
      n += Object.values(counts).reduce((a, b) => a + b, 0)
    }
    return n
  },
  silence: async () => {}, // the lock's duration
  age: async () => {}, // nothing is removed
  async cancel(id) {
    const job = await queue('default').getJob(id)
    if (!job) throw new Error('not cancelled: it is gone')
    await job.remove()
  },
})
