'use strict';
const $ = (selector, from = document) => from.querySelector(selector);
const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];
const make = (tag, props = {}) => Object.assign(document.createElement(tag), props);

// 明暗
$$('.theme').forEach(b => b.onclick = () => bookTheme());

// 窄屏的侧栏
const menu = $('#menu');
const openMenu = open => {
  document.body.classList.toggle('menu-open', open);
  menu.setAttribute('aria-expanded', open);
  $('.shade').hidden = !open;
};
menu.onclick = () => openMenu(menu.getAttribute('aria-expanded') !== 'true');
$('.shade').onclick = () => openMenu(false);
const here = $('.chapters [aria-current]');
if (here) $('#side').scrollTop = Math.max(0, here.offsetTop - innerHeight / 2);

// 标题的锚、代码的复制
$$('main :is(h2, h3, h4)[id]').forEach(h => h.prepend(make('a', {className: 'anchor', href: '#' + encodeURIComponent(h.id), textContent: '#', ariaLabel: '本节链接'})));
$$('div.sourceCode').forEach(box => {
  const button = make('button', {className: 'copy', textContent: '复制', type: 'button'});
  button.onclick = async () => {
    const text = $('code', box).innerText;
    try { await navigator.clipboard.writeText(text); } catch (_) {
      const area = make('textarea', {value: text});
      document.body.append(area); area.select(); document.execCommand('copy'); area.remove();
    }
    button.textContent = '已复制';
    setTimeout(() => button.textContent = '复制', 1500);
  };
  box.append(button);
});

// 本章目录随滚动高亮
const links = new Map($$('aside.toc a').map(a => [decodeURIComponent(a.hash.slice(1)), a]));
const heads = [...links.keys()].map(id => document.getElementById(id)).filter(Boolean);
$('aside.toc').classList.toggle('long', links.size > 20);
const follow = () => {
  const line = innerHeight * .22, last = innerHeight + scrollY >= document.documentElement.scrollHeight - 4;
  const now = last && scrollY > 0 ? heads.at(-1) : heads.filter(h => h.getBoundingClientRect().top < line).at(-1);
  links.forEach((a, id) => a.classList.toggle('here', now?.id === id));
  $$('aside.toc > ul > li').forEach(li => li.classList.toggle('open', !!$('a.here', li)));
  const a = now && links.get(now.id), box = a?.closest('aside');
  if (a && (a.offsetTop < box.scrollTop || a.offsetTop > box.scrollTop + box.clientHeight - 60)) box.scrollTop = a.offsetTop - box.clientHeight / 2;
};
let waiting = false;
addEventListener('scroll', () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; follow(); }); } }, {passive: true});
follow();

// 目标在折叠里就打开；公式排好以后位置会变，再对准一次
const reach = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let d = target.closest('details'); d; d = d.parentElement.closest('details')) d.open = true;
  target.scrollIntoView({behavior: 'instant'});
};
addEventListener('hashchange', reach);
window.MathJax?.startup?.promise?.then(() => { document.documentElement.dataset.math = 'done'; reach(); follow(); });
addEventListener('beforeprint', () => $$('main details').forEach(d => d.open = true));

// 悬停在本页的引用上，就近显示被引用的公式、图或表
const hidePeek = () => $$('.peek').forEach(p => p.remove());
$$('main a.xref').forEach(a => {
  a.onpointerleave = hidePeek;
  a.onpointerenter = e => {
    if (e.pointerType !== 'mouse') return;
    const target = a.pathname === location.pathname && document.getElementById(decodeURIComponent(a.hash.slice(1)));
    if (!target || !target.matches('.equation, figure')) return;
    hidePeek();
    const peek = make('div', {className: 'peek'}), copy = target.cloneNode(true), at = a.getBoundingClientRect();
    copy.removeAttribute('id');
    peek.append(copy);
    document.body.append(peek);
    const below = at.bottom + 10 + peek.offsetHeight < innerHeight || at.top < peek.offsetHeight + 10;
    peek.style.left = Math.max(12, Math.min(at.left, innerWidth - peek.offsetWidth - 16)) + scrollX + 'px';
    peek.style.top = (below ? at.bottom + 8 : at.top - peek.offsetHeight - 8) + scrollY + 'px';
  };
});

// 搜索：每个词都要出现；找不到时按相邻两字（bigram）的重合程度排
const dialog = $('#search'), query = $('#query'), hits = $('#hits');
const index = (window.BOOK_INDEX || []).map(([href, chapter, title, text]) => ({href, chapter, title, text, low: text.toLowerCase(), lowTitle: title.toLowerCase(), lowChapter: chapter.toLowerCase()}));
const count = (text, word) => text.split(word).length - 1;
const exact = (e, words) => words.reduce((score, w) => {
  const s = 30 * e.lowTitle.includes(w) + 8 * e.lowChapter.includes(w) + Math.min(6, count(e.low, w));
  return score && s ? score + s : 0;
}, 1);
const pairs = words => words.flatMap(w => w.length < 3 ? [w] : Array.from({length: w.length - 1}, (_, i) => w.slice(i, i + 2)));
const loose = (e, grams) => {
  const found = grams.filter(g => e.low.includes(g) || e.lowTitle.includes(g)).length / grams.length;
  return found >= .5 ? found : 0;
};
const search = text => {
  const words = text.toLowerCase().split(/[\s，、。]+/).filter(Boolean);
  if (!words.length) return {words, found: []};
  const rank = (score, marks) => index.map(e => ({e, marks, score: score(e)})).filter(r => r.score).sort((a, b) => b.score - a.score).slice(0, 30);
  const found = rank(e => exact(e, words), words);
  return {words, found: found.length ? found : rank(e => loose(e, pairs(words)), pairs(words))};
};
const marked = (text, words) => {
  const node = make('span'), pattern = words.map(w => w.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')).sort((a, b) => b.length - a.length).join('|');
  text.split(new RegExp(`(${pattern})`, 'gi')).forEach((part, i) => node.append(i % 2 ? make('mark', {textContent: part}) : part));
  return node;
};
const snippet = (e, words) => {
  const at = words.map(w => e.low.indexOf(w)).filter(i => i >= 0).sort((a, b) => a - b)[0] ?? 0;
  const from = Math.max(0, at - 24);
  return (from ? '…' : '') + e.text.slice(from, from + 110) + (from + 110 < e.text.length ? '…' : '');
};
const select = item => $$('a', hits).forEach(a => { a.setAttribute('aria-selected', a === item); if (a === item) a.scrollIntoView({block: 'nearest'}); });
query.oninput = () => {
  const {words, found} = search(query.value);
  hits.replaceChildren(...found.map(({e, marks}) => {
    const a = make('a', {href: BOOK_ROOT + e.href, role: 'option'}), title = marked(e.title, marks);
    const b = make('b'); b.append(...title.childNodes);
    a.append(b, make('small', {textContent: e.title === e.chapter ? '' : e.chapter}), marked(snippet(e, marks), marks));
    a.onclick = () => dialog.close();
    a.onmousemove = () => select(a);
    return a;
  }));
  if (words.length && !found.length) hits.append(make('p', {textContent: '没有找到'}));
  select($('a', hits));
};
const openSearch = () => { openMenu(false); if (!dialog.open) dialog.showModal(); query.select(); };
$$('.open-search').forEach(b => b.onclick = openSearch);
$('.close-search').onclick = () => dialog.close();
dialog.onclick = e => { if (e.target === dialog) dialog.close(); };
addEventListener('keydown', e => {
  const typing = /^(input|textarea|select)$/i.test(e.target.tagName) || e.target.isContentEditable;
  if ((e.key === '/' && !typing && !e.ctrlKey && !e.metaKey) || (e.key === 'k' && (e.ctrlKey || e.metaKey))) { e.preventDefault(); openSearch(); }
  if (e.key === 'Escape') { openMenu(false); if (dialog.open) { e.preventDefault(); dialog.close(); } }
  if (!dialog.open || e.isComposing) return;
  const items = $$('a', hits), at = items.findIndex(a => a.getAttribute('aria-selected') === 'true');
  if (e.key === 'ArrowDown' || e.key === 'ArrowUp') { e.preventDefault(); select(items[(at + (e.key === 'ArrowDown' ? 1 : -1) + items.length) % items.length]); }
  if (e.key === 'Enter' && items[at]) { e.preventDefault(); items[at].click(); }
});
