// The disk of this machine, and the store that several machines share.

import { byId, define, make } from "./elements.js";
import { count, size } from "./format.js";

function fill(id, tier, absent, pairs) {
  const holder = byId(id);
  if (!holder.children.length) holder.append(make("p"), make("dl", { class: "figures" }));
  const [told, list] = holder.children;
  const off = tier.mode === "off" && !tier.failed;
  told.textContent = off ? absent : tier.failed ? `${tier.folder} – not used now: ${tier.failed}` : tier.folder;
  told.className = tier.failed ? "bad" : "";
  define(list, off ? [] : pairs);
}

export function showStorage({ disk, remote }) {
  fill("disk", disk, "None: what is evicted from memory is gone. Start the server with --disk auto to keep it.", [
    ["Size", `${size(disk.used_bytes)} of ${size(disk.budget_bytes)}`],
    ["Written today", disk.daily_limit_bytes ? `${size(disk.written_today_bytes)} of ${size(disk.daily_limit_bytes)}` : size(disk.written_today_bytes)],
    ["Written ever, to this folder", size(disk.written_ever_bytes)],
    ["Records", count(disk.records)],
    ["Mode", disk.mode],
    ["Requests that read from it", count(disk.hits)],
    ["Tokens read back", count(disk.restored_tokens)],
    ["Tokens written", count(disk.spilled_tokens)],
    ["Tokens not read: computing was quicker", count(disk.skipped_tokens)],
    ["Records that could not be used", count(disk.rejected_records)],
    ["Records evicted", count(disk.evicted_records)],
    ["Writing now", disk.pending ? "yes" : "no"],
  ]);
  fill("remote", remote, "None. Start the server with --remote URL to share KV with other machines.", [
    ["Requests that read from it", count(remote.hits)],
    ["Tokens read", count(remote.restored_tokens)],
    ["Read", size(remote.restored_bytes)],
    ["Tokens written", count(remote.spilled_tokens)],
    ["Written", size(remote.written_bytes)],
    ["Values written", count(remote.records)],
    ["Tokens not read: computing was quicker", count(remote.skipped_tokens)],
    ["Values that could not be used", count(remote.rejected_records)],
    ["Not read or not written", Object.entries(remote.reasons).map(([why, n]) => `${why.replace("not written: ", "")}: ${count(n)}`).join("; ") || "0"],
    ["Writing now", remote.pending ? "yes" : "no"],
  ]);
}
