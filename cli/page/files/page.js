// Keeps the page up to date: it reads the same address again and replaces what differs. The page works without it.
'use strict';
(() => {
  const main = document.querySelector('main[data-live]');
  const filter = document.getElementById('q');
  const every = 2000, patience = 20000; // ms
  let tag = '', timer = 0, newest = 0;

  // merge makes the children of now those of next. A child that is equal stays, and so do the focus, and which details are open.
  const merge = (now, next) => {
    const known = new Map([...now.children].filter((e) => e.id).map((e) => [e.id, e]));
    const children = [...next.children].map((fresh) => {
      const old = known.get(fresh.id);
      if (!old) return fresh;
      if (old instanceof HTMLDetailsElement) fresh.open = old.open;
      if (old.isEqualNode(fresh)) return old;
      if (old.tagName === 'SECTION') {
        merge(old, fresh);
        return old;
      }
      return fresh;
    });
    if (children.length === now.children.length && children.every((e, i) => e === now.children[i])) return;
    const focused = document.activeElement && document.activeElement.id;
    now.replaceChildren(...children);
    if (focused) document.getElementById(focused)?.focus();
  };

  const say = (text) => {
    const live = document.getElementById('live');
    if (live.textContent !== text) live.textContent = text;
  };

  const read = async () => {
    clearTimeout(timer);
    const mine = ++newest;
    try {
      const answer = await fetch(location.href, {headers: tag ? {'If-None-Match': tag} : {}, cache: 'no-store', signal: AbortSignal.timeout(patience)});
      const text = answer.ok ? await answer.text() : '';
      if (mine !== newest) return;
      const time = answer.headers.get('Data-Time');
      if (answer.ok) {
        const next = new DOMParser().parseFromString(text, 'text/html');
        merge(main, next.querySelector('main'));
        document.title = next.title;
        tag = answer.headers.get('ETag');
      } else if (time) {
        const at = document.getElementById('at');
        at.dateTime = at.title = time;
        at.textContent = time.slice(11, 19);
      }
      say(answer.ok || answer.status === 304 ? '' : `Not up to date: kubectl gpu ui answers ${answer.status}.`);
    } catch {
      if (mine !== newest) return;
      say('Not up to date: kubectl gpu ui has ended or does not answer.');
    }
    timer = setTimeout(() => document.hidden || read(), every);
  };

  if (!main) return;
  document.addEventListener('visibilitychange', () => document.hidden || read());

  // go reads another address of the same page.
  const go = (parameters) => {
    const search = parameters.size ? '?' + parameters : '';
    if (search === location.search) return;
    history.replaceState(null, '', search || './');
    tag = '';
    read();
  };
  filter?.addEventListener('input', () => go(new URLSearchParams(filter.value ? {q: filter.value} : {})));
  // The server sends what these details contain only for those that the address names.
  let opened = [...main.querySelectorAll('details[data-asks][open]')].map((e) => e.id);
  main.addEventListener('toggle', ({target}) => {
    // The server sends a few: those that were opened last stay open.
    opened = opened.filter((id) => id !== target.id);
    if (target.open && 'asks' in target.dataset) opened.push(target.id);
    for (const id of opened.splice(0, Math.max(0, opened.length - main.dataset.opened))) {
      const first = document.getElementById(id);
      if (first) first.open = false;
    }
    const parameters = new URLSearchParams(location.search);
    parameters.delete('open');
    for (const e of main.querySelectorAll('details[data-asks][open]')) parameters.append('open', e.id);
    go(parameters);
  }, true);
  read();
})();
