import { el } from "./dom.js";
export async function speedView() { return el('p', {}, 'speed'); }
