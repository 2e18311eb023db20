import { UnrecoverableError, Worker } from 'bullmq'

export function bridge(connection, url) {
  return new Worker('mail', async (job) => {
    const res = await fetch(url, { method: 'POST', body: JSON.stringify(job.data) })
    if (res.status === 400 || res.status === 409) throw new UnrecoverableError(await res.text())
    if (!res.ok) throw new Error(`not accepted: ${res.status}`)
  }, { connection, concurrency: 10 })
}
