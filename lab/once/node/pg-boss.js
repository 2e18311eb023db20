// pg-boss with transactional workers. Its queues have policies: the name of a queue says which kind of job is in it.

import { createHash } from 'node:crypto'
import { PgBoss } from 'pg-boss'
import { serve, pool, url, insertRow, noRate, Missing } from './serve.js'

const boss = new PgBoss({ connectionString: url, superviseIntervalSeconds: 3600, max: 10 })
boss.on('error', () => {})

const queues = {
  work: {},
  new: {},
  long: { expireInSeconds: 3 * 3600, heartbeatSeconds: 10 },
  moved: {},
  changes: { policy: 'stately' },
  lanes: { policy: 'key_strict_fifo' },
  limited: {},
}
const db = (client) => ({ executeSql: (text, values) => client.query(text, values) })
const uuid = (key) => createHash('sha1').update(key).digest('hex').replace(/^(.{8})(.{4}).(.{3}).(.{3})(.{12}).*$/, '$1-$2-5$3-8$4-$5')
const queueOf = (j) =>
  j.lane ? 'lanes' : j.limit ? 'limited' : j.life === 'done' ? 'changes' : j.queue ? j.queue : j.kind || 'work'

function jobOf(j) {
  const job = { data: { n: j.n }, retryDelay: 0 }
  if (j.attempts) job.retryLimit = j.attempts - 1
  if (j.delay) job.startAfter = new Date(Date.now() + j.delay)
  if (j.lane) job.singletonKey = j.lane
  if (j.limit) job.group = { id: j.limit }
  if (j.life === 'done') job.singletonKey = j.key
  if (j.life === 'day') Object.assign(job, { singletonKey: j.key, singletonSeconds: 86400 })
  if (j.life === 'ever') Object.assign(job, { id: uuid(j.key), deleteAfterSeconds: 0 })
  return job
}

let started
const start = () => (started ??= boss.start())

serve({
  async setup() {
    await start()
    for (const [name, options] of Object.entries(queues)) await boss.createQueue(name, { name, ...options })
  },
  async enqueue(jobs, tx) {
    await start()
    const options = tx ? { db: db(tx) } : {}
    if (jobs.at(-1).rate) throw new Missing(noRate)
    if (jobs.at(-1).group) {
      const refs = jobs.map((j, i) => ({ ref: `r${i}`, name: 'work', data: { n: j.n }, options: { retryLimit: (j.attempts || 3) - 1 } }))
      refs.at(-1).dependsOn = refs.slice(0, -1).map((r) => r.ref)
      const ids = await boss.flow(refs, options)
      return refs.map((r) => ({ id: ids[r.ref] }))
    }
    if (jobs.length > 1) {
      const ids = await boss.insert(queueOf(jobs[0]), jobs.map(jobOf), { ...options, returnId: true })
      return (ids ?? []).map((id) => ({ id }))
    }
    const { data, ...rest } = jobOf(jobs[0])
    const id = await boss.send(queueOf(jobs[0]), data, { ...rest, ...options })
    return [id ? { id } : { id: '', duplicate: true }]
  },
  async work(crew, handle) {
    if (crew.every) throw new Missing('not played: its schedules are by the minute, those of this story by the second')
    await start()
    const names = crew.kinds.includes('work') ? ['changes', 'lanes', 'limited'] : []
    names.push(...crew.kinds, ...crew.queues.filter((q) => q !== 'default'))
    for (const name of names) {
      const options = { transactional: true, includeMetadata: true, pollingIntervalSeconds: 0.5, localConcurrency: crew.at_once }
      if (name === 'limited') options.groupConcurrency = 2
      await boss.work(name, options, ([job], tx) =>
        handle({
          n: job.data.n,
          attempt: job.retryCount + 1,
          write: (n) => tx.executeSql(insertRow, [n]),
          call: (what, fn) => fn(`pg-boss-${job.id}-${what}`),
          end: () => tx.executeSql('commit'),
        }),
      )
    }
    return () => boss.stop({ graceful: true, timeout: crew.stop_within, close: false })
  },
  async left() {
    const { rows } = await pool.query(
      `select count(*)::int as n from pgboss.job where state < 'completed' and name = any($1)`,
      [Object.keys(queues)],
    )
    return rows[0].n
  },
  // The time of a job (expireInSeconds), and a heartbeat that does not come.
  async silence() {
    await start()
    await pool.query(`update pgboss.job set started_on = started_on - interval '1 hour' where state = 'active'`)
    await boss.supervise()
  },
  async age() {
    await start()
    await pool.query(`update pgboss.job set completed_on = completed_on - interval '30 days' where completed_on is not null`)
    await pool.query(`update pgboss.queue set maintain_on = null, monitor_on = null`)
    await boss.supervise()
  },
  async cancel(id) {
    await start()
    const { affected } = await boss.cancel('work', id)
    if (affected === 0) throw new Error('not cancelled')
  },
})
