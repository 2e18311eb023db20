import { PgBoss } from 'pg-boss'

export async function startBefore(url) {
  const boss = new PgBoss(url)
  boss.on('error', console.error)
  await boss.start()
  await boss.createQueue('welcome', { policy: 'exclusive', retryLimit: 25, retryBackoff: true })
  return boss
}

export function sendBefore(boss, userId) {
  return boss.send('welcome', { userId }, { singletonKey: `welcome:${userId}` })
}

export function workBefore(boss, sendMail) {
  return boss.work('welcome', async ([job]) => sendMail(job.data.userId))
}
