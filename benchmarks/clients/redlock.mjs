// redlock with ioredis on node: the same work and the same words as benchmarks/worker.py.
//
//   node redlock.mjs <folder with node_modules> <order as JSON>

import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { writeSync } from 'node:fs';

const [folder, text] = process.argv.slice(2);
const order = JSON.parse(text);
const require = createRequire(`${folder}/`);
const Redis = require('ioredis');
const Redlock = require('redlock');

const DRAIN_MS = 5000;
const SETTLE_MS = 1000;
const CALM_PART = 0.4;
const HOLDER_TTL_MS = 60000;

const servers = order.ports.map((port) => new Redis(port, '127.0.0.1'));
// Who says nothing about a lost connection is ended by it.
for (const server of servers) server.on('error', () => {});
// For ever, as the others wait; the pauses are its own: 200 ms, with up to 100 of jitter.
const redlock = new Redlock(servers, { retryCount: -1 });
const ttlMs = order.ttl_s * 1000;
const errors = {};

// Nanoseconds of the monotonic clock: Python's time.monotonic_ns is the same.
const nowNs = () => Number(process.hrtime.bigint());
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const turn = () => new Promise((resolve) => setImmediate(resolve));
const cpuSeconds = () => {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
};

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const write = (line) => {
  // A pipe may take only a part of a long line at once.
  const bytes = Buffer.from(`${line}\n`);
  for (let at = 0; at < bytes.length; ) {
    try {
      at += writeSync(1, bytes, at);
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
    }
  }
};

async function exchange(said, awaited) {
  write(said);
  const { value } = await lines.next();
  if (value !== awaited) throw new Error(`said ${said}, heard ${value}`);
}

async function failed(error) {
  errors[error.name] = (errors[error.name] ?? 0) + 1;
  await sleep(1);
}

// Runs all, but no longer than that.
const bounded = (bodies, ms) => Promise.race([Promise.all(bodies), sleep(ms)]);

async function cycles() {
  const run = async (windowS) => {
    const counts = new Array(order.tasks).fill(0);
    const beganNs = nowNs();
    const endNs = beganNs + windowS * 1e9;
    const repeat = async (place) => {
      const name = `own-${order.worker}-${place}`;
      while (nowNs() < endNs) {
        try {
          await (await redlock.lock(name, ttlMs)).unlock();
          counts[place] += 1;
        } catch (error) {
          await failed(error);
        }
      }
    };
    const sum = () => counts.reduce((a, b) => a + b, 0);
    const watch = sleep(windowS * 1000).then(() => sum() / ((nowNs() - beganNs) / 1e9));
    await bounded(counts.map((_, place) => repeat(place)), windowS * 1000 + DRAIN_MS);
    return { cycles: sum(), cycles_per_s: await watch };
  };
  await run(order.warm_up_s);
  await exchange('ready', 'go');
  const beganCpu = cpuSeconds();
  const result = await run(order.window_s);
  const cpu_s = cpuSeconds() - beganCpu;
  await exchange('done', 'end');
  return { ...result, cpu_s, errors };
}

async function trouble() {
  const spell = async (windowS) => {
    const told = { cycles: 0, seconds: 0, cpu_s: 0, longest_ms: 0 };
    const beganCpu = cpuSeconds();
    const beganNs = nowNs();
    const endNs = beganNs + windowS * 1e9;
    let askedNs = beganNs;
    const repeat = async () => {
      while (askedNs < endNs || told.cycles === 0) {
        try {
          await (await redlock.lock(`own-${order.worker}-0`, ttlMs)).unlock();
          told.cycles += 1;
        } catch (error) {
          await failed(error);
        }
        const endedNs = nowNs();
        told.longest_ms = Math.max(told.longest_ms, (endedNs - askedNs) / 1e6);
        askedNs = endedNs;
      }
    };
    await bounded([repeat()], windowS * 1000 + DRAIN_MS);
    const now = nowNs();
    told.seconds = (now - beganNs) / 1e9;
    told.cpu_s = cpuSeconds() - beganCpu;
    told.longest_ms = Math.max(told.longest_ms, (now - askedNs) / 1e6);
    return { ...told }; // A cycle that hangs may end later.
  };
  await spell(order.warm_up_s);
  const calm = await spell(order.window_s * CALM_PART);
  await exchange('ready', 'go');
  const troubled = await spell(order.window_s);
  await exchange('done', 'end');
  return { calm, troubled, errors };
}

async function compete() {
  const who = (place) => `${order.worker}.${place}`;
  const run = async (name, windowS) => {
    const stays = [];
    const asked = new Array(order.tasks).fill(null);
    const beganNs = nowNs();
    const endNs = beganNs + windowS * 1e9;
    const repeat = async (place) => {
      for (let askedNs = nowNs(); askedNs < endNs; askedNs = nowNs()) {
        asked[place] = askedNs;
        try {
          const lock = await redlock.lock(name, ttlMs);
          const enteredNs = nowNs();
          asked[place] = null;
          await turn();
          const leftNs = nowNs();
          stays.push([who(place), askedNs, enteredNs, leftNs]);
          await lock.unlock();
        } catch (error) {
          await failed(error);
        }
      }
    };
    await bounded(asked.map((_, place) => repeat(place)), windowS * 1000 + DRAIN_MS);
    const now = nowNs();
    const unserved_ms = asked.filter((one) => one !== null).map((one) => (now - one) / 1e6);
    return { began_ns: beganNs, ended_ns: endNs, stays, unserved_ms };
  };
  // Another name: who is left behind in the warm-up may hold it for the rest of its ttl.
  await run('bench-warm', order.warm_up_s);
  await exchange('ready', 'go');
  const beganCpu = cpuSeconds();
  const result = await run('bench', order.window_s);
  const cpu_s = cpuSeconds() - beganCpu;
  await exchange('done', 'end');
  return { ...result, cpu_s, errors, everyone: asked_by(who) };
}

const asked_by = (who) => Array.from({ length: order.tasks }, (_, place) => who(place));

async function wait() {
  await redlock.lock('bench', HOLDER_TTL_MS);
  let entered = 0;
  for (let n = 0; n < order.tasks; n++) {
    redlock.lock('bench', ttlMs).then(() => (entered += 1), failed);
  }
  await sleep(SETTLE_MS);
  await exchange('ready', 'go');
  const beganNs = nowNs();
  const beganCpu = cpuSeconds();
  await sleep(order.window_s * 1000);
  const seconds = (nowNs() - beganNs) / 1e9;
  const cpu_s = cpuSeconds() - beganCpu;
  await exchange('done', 'end');
  return { seconds, cpu_s, overlaps: entered, errors };
}

const result = await { cycles, compete, wait, trouble }[order.work]();
write(JSON.stringify(result));
process.exit(0);
