// Graphile Worker: https://worker.graphile.org
//
// Tuned as its page on performance says: 24 jobs side by side, a local queue of 500, finished jobs
// removed in batches. Speaks as common.py does: node graphile.mjs MODULES COMMAND ARGUMENTS.

import { EventEmitter } from "node:events";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

const [modules, command, text] = process.argv.slice(2);
const require = createRequire(`${modules}/package.json`);
const { Logger, run, runMigrations } = require("graphile-worker");
const pg = require("pg");

const CHUNK = 5000;
const SLEEPERS = 100;
const PAUSE = 50;
const logger = new Logger(() => () => {});
const settings = {
  concurrentJobs: 24,
  maxPoolSize: 25,
  localQueue: { size: 500 },
  completeJobBatchDelay: 0,
  failJobBatchDelay: 0,
  logger,
};
const preset = { worker: settings };
const now = () => Number(process.hrtime.bigint()) / 1e9;
const say = (data) => process.stdout.write(JSON.stringify(data) + "\n");

async function single({ insert, payload }) {
  const client = new pg.Client();
  await client.connect();
  const order = { name: "order", text: insert.replace("%s", "$1"), values: ["both"] };
  const add = "select id from graphile_worker.add_job('noop', $1::json)";
  return async () => {
    await client.query("begin");
    const number = (await client.query(order)).rows[0].id;
    const values = [JSON.stringify({ ...payload, number: Number(number) })];
    const { id } = (await client.query({ name: "add", text: add, values })).rows[0];
    await client.query("commit");
    return [number, id];
  };
}

async function enqueue({ count, warm_up, ...how }) {
  const one = await single(how);
  const pairs = [];
  for (let n = 0; n < warm_up; n++) pairs.push(await one());
  const began = now();
  for (let n = 0; n < count; n++) pairs.push(await one());
  return { seconds: now() - began, pairs };
}

async function produce({ count, every, ...how }) {
  const one = await single(how);
  const commits = [];
  let at = now();
  for (let n = 0; n < count; n++) {
    at += every;
    await sleep(Math.max(0, (at - now()) * 1000));
    const [, id] = await one();
    commits.push([id, now()]);
  }
  return { commits };
}

async function bulk({ count, payload }) {
  const client = new pg.Client();
  await client.connect();
  const add = `select id from graphile_worker.add_jobs(array(
    select json_populate_recordset(null::graphile_worker.job_spec, $1::json)))`;
  const ids = [];
  const began = now();
  await client.query("begin");
  for (let at = 0; at < count; at += CHUNK) {
    const jobs = Array.from({ length: Math.min(CHUNK, count - at) }, (_, place) => ({
      identifier: "noop",
      payload: { ...payload, number: at + place },
    }));
    const values = [JSON.stringify(jobs)];
    ids.push(...(await client.query({ name: "add", text: add, values })).rows.map((r) => r.id));
  }
  await client.query("commit");
  return { seconds: now() - began, ids };
}

async function work({ task }) {
  const ids = [];
  const starts = [];
  let begin = null;
  let cpu;
  let spent = { user: 0, system: 0 };
  let end = 0;
  let done = 0;
  // It tells that a job is complete before it is removed; so the removal itself is timed.
  const query = pg.Client.prototype.query;
  pg.Client.prototype.query = function (config, ...rest) {
    const answer = query.call(this, config, ...rest);
    if (/^delete from \S+_private_jobs/.test(config?.text)) {
      answer.then((result) => {
        end = now();
        spent = process.cpuUsage(cpu);
        done += result.rowCount;
      });
    }
    return answer;
  };
  const noop = (payload, { job }) => {
    starts.push(now());
    ids.push(job.id);
    return task === "sleep" ? sleep(PAUSE) : undefined;
  };
  const events = new EventEmitter();
  events.on("pool:create", () => {
    begin = now();
    cpu = process.cpuUsage();
  });
  const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  const pool = new pg.Pool({ max: settings.maxPoolSize });
  pool.on("error", () => {});
  pool.on("connect", (client) => client.on("error", () => {}));
  await pool.query("select 1");
  say({ ready: true });
  await lines.next();
  let told = 0;
  const report = setInterval(() => done !== told && say({ done: (told = done) }), 50);
  const runner = await run({
    pgPool: pool,
    preset: { worker: task === "sleep" ? { ...settings, concurrentJobs: SLEEPERS } : settings },
    events,
    taskList: { noop },
    parsedCronItems: [],
    noHandleSignals: true,
  });
  await lines.next();
  await runner.stop();
  clearInterval(report);
  return { begin, end, ids, starts, cpu: (spent.user + spent.system) / 1e6 };
}

const commands = { enqueue, produce, bulk, work, schema: () => runMigrations({ preset }) };
const result = await commands[command](JSON.parse(text ?? "{}"));
process.stdout.write(JSON.stringify(result ?? {}) + "\n", () => process.exit(0));
