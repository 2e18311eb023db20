import { Queue, Worker } from 'bullmq'

export async function addBefore(connection, userId) {
  const queue = new Queue('mail', { connection })
  await queue.add('welcome', { userId }, { jobId: `welcome-${userId}`, attempts: 25, backoff: { type: 'exponential', delay: 1000 } })
  await queue.close()
}

export function workBefore(connection, sendMail) {
  return new Worker('mail', async (job) => sendMail(job.data.userId), { connection, concurrency: 10 })
}
