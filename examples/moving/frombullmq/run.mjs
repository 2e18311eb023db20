// What the test runs, against the Redis at REDIS_SOCKET:
//
//	add 42 7        a producer
//	work            the worker as it was; prints what it sends and completes, until standard input ends
//	bridge <url>    the worker that hands over
//	counts          prints how many jobs the queue has in each state

import { Queue } from 'bullmq'
import { addBefore, workBefore } from './before.mjs'
import { bridge } from './bridge.mjs'

const connection = { path: process.env.REDIS_SOCKET }
const [, , what, ...args] = process.argv

async function untilEnd(worker) {
  worker.on('completed', (job) => console.log(`completed ${job.id}`))
  worker.on('failed', (job, err) => console.log(`failed ${job.id}: ${err.name}`))
  process.stdin.resume()
  await new Promise((resolve) => process.stdin.once('end', resolve))
  await worker.close()
}

switch (what) {
  case 'add':
    for (const userId of args) await addBefore(connection, Number(userId))
    break
  case 'work':
    await untilEnd(workBefore(connection, async (userId) => console.log(`sent ${userId}`)))
    break
  case 'bridge':
    await untilEnd(bridge(connection, args[0]))
    break
  case 'counts': {
    const queue = new Queue('mail', { connection })
    console.log(JSON.stringify(await queue.getJobCounts()))
    await queue.close()
    break
  }
  default:
    throw new Error(`no ${what}`)
}
