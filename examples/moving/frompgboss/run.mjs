// What the test runs, against the database at DATABASE_URL:
//
//	send 42 7    a producer; prints which jobs were accepted
//	work         the worker as it was; prints what it sends, and is done with none of it before standard input ends

import { sendBefore, startBefore, workBefore } from './before.mjs'

const [, , what, ...args] = process.argv
const boss = await startBefore(process.env.DATABASE_URL)

switch (what) {
  case 'send':
    for (const userId of args) console.log(`${userId} ${(await sendBefore(boss, Number(userId))) ? 'accepted' : 'refused'}`)
    break
  case 'work': {
    process.stdin.resume()
    const end = new Promise((resolve) => process.stdin.once('end', resolve))
    await workBefore(boss, async (userId) => {
      console.log(`sending ${userId}`)
      await end
    })
    await end
    break
  }
  default:
    throw new Error(`no ${what}`)
}
await boss.stop()
