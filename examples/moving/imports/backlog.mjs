// Enqueues what the test imports, in pg-boss or graphile-worker, against the database at DATABASE_URL: five welcome mails and a report.
// One mail is due in an hour, one comes first, one has had an attempt, and one runs. They are those to users 3, 4, 5 and 1.
// That to user 6, in graphile-worker alone, is behind one that runs.

import { makeWorkerUtils } from 'graphile-worker'
import { PgBoss } from 'pg-boss'

const connectionString = process.env.DATABASE_URL

async function pgBoss() {
  const boss = new PgBoss(connectionString)
  await boss.start()
  await boss.createQueue('welcome', { retryLimit: 5, retryDelay: 3600 })
  await boss.createQueue('report')
  const send = (user_id, options) => boss.send('welcome', { user_id }, { singletonKey: `welcome:${user_id}`, ...options })
  await send(5)
  const [failing] = await boss.fetch('welcome')
  await boss.fail('welcome', failing.id)
  await send(1)
  await boss.fetch('welcome')
  await send(2)
  await send(3, { startAfter: 3600 })
  await send(4, { priority: 5 })
  await boss.send('report', { month: 11 })
  await boss.stop()
}

async function graphile() {
  const utils = await makeWorkerUtils({ connectionString })
  await utils.migrate()
  const send = (user_id, spec) =>
    utils.addJob('welcome', { user_id }, { jobKey: `welcome:${user_id}`, maxAttempts: 6, ...spec })
  for (const [user, spec] of [[5], [1], [2], [3, { runAt: new Date(Date.now() + 3600000) }], [4, { priority: -5, queueName: 'mails' }], [6, { queueName: 'busy' }]]) await send(user, spec)
  await utils.addJob('report', { month: 11 })
  await utils.withPgClient(async (client) => {
    await client.query(`update graphile_worker._private_jobs set attempts = 1 where key = 'welcome:5'`)
    await client.query(`update graphile_worker._private_job_queues set locked_at = now() where queue_name = 'busy'`)
    await client.query(`update graphile_worker._private_jobs set locked_at = now(), locked_by = 'worker', attempts = 1 where key = 'welcome:1'`)
  })
  await utils.release()
}

await { 'pg-boss': pgBoss, graphile }[process.argv[2]]()
