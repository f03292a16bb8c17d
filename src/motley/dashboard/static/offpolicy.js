import { el } from "./dom.js";
export async function offpolicyView() { return el('p', {}, 'offpolicy'); }
