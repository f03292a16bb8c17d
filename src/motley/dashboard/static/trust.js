import { el } from "./dom.js";
export async function trustView() { return el('p', {}, 'trust'); }
