// A list that may be long: its newest rows as they are now, older ones on demand, and a field that finds some of them.
import { get } from "./api.js";
import { t } from "./i18n.js";
import { Failure, Field, html, useAct, useRef, useState } from "./ui.js";

const FEW = 8; // rows among which nobody needs to search

const made = (row) => row.created_s ?? row.created_at;

/** answer: the first page, {data, has_more}; every row has an id and when it was created. older: of the last row's id, the
 *  path of the next page; left out where the list comes whole. text: of a row, what is searched. children: of the rows to
 *  show and the words in place of none (`empty`, if nothing is searched), what is drawn. */
export function Rows({ answer, older, text, empty, children }) {
  const known = useRef(new Map());
  const [left, setLeft] = useState(null);
  const [wanted, setWanted] = useState("");
  const [more, { busy, error }] = useAct(async (after) => {
    const page = await get(older(after));
    for (const row of [...answer.data, ...page.data]) known.current.set(row.id, row);
    setLeft(page.has_more);
  });
  // What came after the page's last row and is not among the rows of this page was pushed out of it by newer ones.
  const ids = new Set(answer.data.map((row) => row.id));
  const last = answer.data[answer.data.length - 1];
  const behind = [...known.current.values()].filter((row) => !ids.has(row.id) && last && made(row) <= made(last));
  if (known.current.size) for (const row of answer.data) known.current.set(row.id, row);
  const rows = [...answer.data, ...behind.sort((a, b) => made(b) - made(a))];
  const words = wanted.trim().toLowerCase();
  const shown = words ? rows.filter((row) => text(row).toLowerCase().includes(words)) : rows;
  return html`
    ${rows.length > FEW || wanted ? html`<${Field} label=${t("find")}><input type="search" value=${wanted} onInput=${(event) => setWanted(event.target.value)} /></${Field}>` : null}
    ${children(shown, words ? t("find.none") : empty)}
    <${Failure} error=${error} />
    ${older && (left ?? answer.has_more) ? html`<div class="buttons"><button type="button" disabled=${busy} onClick=${() => more(rows[rows.length - 1].id)}>${t("find.older")}</button></div>` : null}
  `;
}
