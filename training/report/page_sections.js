// Makes the sections of the page, with the plots, the memory and the load of experts, and its
// controls. It follows page_plot.js, which draws a plot.

// ---- Sections -----------------------------------------------------------------------------------

const dash = style => style === 'dashed' ? ' dashed' : style === 'thin' ? ' thin'
    : style === 'mean' ? ' mean' : '';
function legend(plot) {
    const item = (drawing, label) =>
        `<span><svg viewBox="0 0 26 10">${drawing}</svg>${escaped(label)}</span>`;
    if (plot.shares)
        return phases.map((phase, p) =>
            item(`<rect class="area p${p}" width="26" height="10"/>`, phase)).join('');
    const seen = new Map();
    for (const entry of plot.entries)
        if (!entry.silent && !seen.has(entry.what)) seen.set(entry.what, entry);
    let text = '';
    if (seen.size > 1) for (const [label, entry] of seen)
        text += item(
            `<path class="line${dash(entry.style)} ${several ? '' : entry.colour}" ` +
                `${several ? 'style="--c:var(--soft)"' : ''} d="M0 5H26"/>` +
                (entry.style === 'dots'
                    ? `<circle class="dot ${several ? '' : entry.colour}" ` +
                        `${several ? 'style="--c:var(--soft)"' : ''} cx="13" cy="5" r="3.5"/>`
                    : ''),
            label);
    if (plot.limit && plot.entries.some(entry => plot.limit.of(entry.run) > 0))
        text += item(`<path class="line dashed ${several ? '' : 'c0'}" ` +
            `${several ? 'style="--c:var(--soft)"' : ''} d="M0 5H26"/>`, plot.limit.label);
    return text;
}

/// first: above the summary.
function section(title, good, full, first) {
    const node = document.createElement('section');
    node.className = full ? 'full' : '';
    node.innerHTML = `<div class="head"><h2>${escaped(title)}</h2>` +
        `<p class="good">${escaped(good)}</p></div>`;
    document.getElementById(first ? 'first' : 'plots').append(node);
    return node;
}

function memory() {
    const purposes = [...new Set(runs.flatMap(run => run.memory.map(([purpose]) => purpose)))];
    if (!purposes.length) return;
    const node = section('Memory', 'What one rank has allocated, by purpose. All of it is ' +
        'allocated before the first step and never grows, so that a run whose first step fits ' +
        'does not run out of memory later.', runs.length > 3);
    const of = (run, purpose) => run.memory.find(([name]) => name === purpose)?.[1] ?? 0;
    const names = {kv_cache: 'key-value cache', masters: 'fp32 weights', parameters: 'weights',
        moments: 'optimizer’s moments', staging: 'host buffers'};
    const total = run => run.memory.reduce((sum, [, size]) => sum + size, 0);
    const most = Math.max(...purposes.flatMap(purpose => runs.map(run => of(run, purpose))));
    node.insertAdjacentHTML('beforeend', '<div class="bars">' + purposes.map(purpose =>
        `<span>${escaped(names[purpose] ?? purpose)}</span>` +
        `<div class="${several ? 'several' : ''}">` +
        runs.map((run, r) =>
            `<i class="c${r}" style="width:${100 * of(run, purpose) / most}%"></i>`).join('') +
        '</div>' +
        `<span class="figures">${runs.map(run => bytes(of(run, purpose))).join('<br>')}</span>`)
        .join('') +
        '<span class="total">total</span><div></div>' +
        `<span class="figures total">${runs.map(run => bytes(total(run))).join('<br>')}</span>` +
        '</div>');
}

// ---- The load of experts ------------------------------------------------------------------------

/// Letter n of a load stands for 0 or for 2^((n − 32) / 6) times the mean (router_picture.h).
const letters = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_';
const loadOf = level => level ? 2 ** ((level - 32) / 6) : 0;
/// Above the mean in one colour, below it in another; full at 8 times and at an eighth. Idle
/// experts stand out.
const heat = level => level
    ? `color-mix(in oklab, var(${level > 32 ? '--c1' : '--c0'}) ` +
        `${Math.min(100, Math.round(100 * Math.abs(level - 32) / 18))}%, var(--tint))`
    : 'var(--ink)';

function loads(run, first) {
    const {layers, experts, steps, load} = run.routers;
    const node = section(several ? 'Load of experts: ' + run.name : 'Load of experts', !first ? '' :
        'How often each expert of each layer was chosen in a step. Good: near the mean ' +
        'everywhere, in the last steps too. A layer that stays orange in a few places and blue ' +
        'or empty in all others has collapsed: few experts get the tokens, and the others learn ' +
        'little.', true);
    const item = (level, label) => '<span><svg viewBox="0 0 26 10">' +
        `<rect style="fill:${heat(level)}" width="26" height="10"/></svg>${label}</span>`;
    node.insertAdjacentHTML('beforeend', '<div class="legend">' + item(0, 'never chosen') +
        [['1/8 and less', 14], ['1/4', 20], ['1/2', 26], ['the mean', 32], ['2 times', 38],
            ['4', 44], ['8 and more', 50]].map(([label, level]) => item(level, label)).join('') +
        '</div><div><div class="chart heat"><div class="tip" hidden></div></div>' +
        `<label class="time"><input type="range" min="0" max="${steps.length - 1}" ` +
        `value="${steps.length - 1}" aria-label="step"` +
        `${steps.length < 2 ? ' hidden' : ''}><output></output></label></div>`);
    const host = node.querySelector('.chart'), box = node.querySelector('.tip'),
        slider = node.querySelector('input');
    let left = inset.left, cell = [1, 1], shown = '';
    const draw = () => {
        const i = +slider.value, width = Math.max(260, host.clientWidth || 700),
            right = width - inset.right;
        const w = (right - left) / experts, h = Math.min(22, Math.max(6, 400 / layers.length)),
            base = inset.top + h * layers.length;
        shown = load[i];
        cell = [w, h];
        const gap = Math.min(w, h) > 5 ? 1 : 0, paths = new Map();
        [...shown].forEach((letter, at) => {
            const level = letters.indexOf(letter), x = left + at % experts * w,
                y = inset.top + Math.floor(at / experts) * h;
            paths.set(level, (paths.get(level) ?? '') + `M${x.toFixed(2)} ${y.toFixed(2)}` +
                `h${(w - gap).toFixed(2)}v${(h - gap).toFixed(2)}h${(gap - w).toFixed(2)}z`);
        });
        const every = Math.ceil(13 / h), parts = [...paths].map(([level, d]) =>
            `<path data-level="${level}" style="fill:${heat(level)}" d="${d}"/>`);
        layers.forEach((layer, l) => {
            if (l % every === 0)
                parts.push(`<text x="${left - 8}" y="${inset.top + (l + 0.5) * h + 4}" ` +
                    `text-anchor="end">${layer}</text>`);
        });
        for (const e of ticks(0, experts - 1, Math.max(2, width / 110)).filter(Number.isInteger))
            parts.push(`<text x="${left + (e + 0.5) * w}" y="${base + 15}" ` +
                `text-anchor="middle">${e}</text>`);
        host.querySelector('svg')?.remove();
        host.insertAdjacentHTML('afterbegin',
            `<svg viewBox="0 0 ${width} ${base + 34}" role="img" aria-label="Load of experts" ` +
            `data-heat="${runs.indexOf(run)}" data-step="${steps[i]}">${parts.join('')}` +
            '<text x="0" y="11">layer</text>' +
            `<text x="${right}" y="${base + 30}" text-anchor="end">expert</text></svg>`);
        node.querySelector('output').textContent = 'step ' + grouped(steps[i]);
    };
    slider.addEventListener('input', () => { box.hidden = true; draw(); });
    host.addEventListener('pointermove', event => {
        const frame = host.getBoundingClientRect(), x = event.clientX - frame.left,
            y = event.clientY - frame.top;
        const e = Math.floor((x - left) / cell[0]), l = Math.floor((y - inset.top) / cell[1]);
        box.hidden = !(e >= 0 && e < experts && l >= 0 && l < layers.length);
        if (box.hidden) return;
        const level = letters.indexOf(shown[l * experts + e]);
        box.innerHTML = `<b>layer ${layers[l]}, expert ${e}</b><br>` +
            (level ? `about ${loadOf(level).toPrecision(2)} times the mean` : 'never chosen');
        box.style.left = Math.max(0, x + 14 + box.offsetWidth > frame.width
            ? x - 14 - box.offsetWidth : x + 14) + 'px';
        box.style.top = y + 14 + 'px';
    });
    host.addEventListener('pointerleave', () => { box.hidden = true; });
    return draw;
}

// ---- Drawing and controls -----------------------------------------------------------------------

let drawnPoints = 0;
const shownPlots = plots.filter(plot => plot.shares || plot.entries.length);
shownPlots.forEach((plot, number) => {
    const node = section(plot.title, plot.good, plot.full, number === 0);
    node.insertAdjacentHTML('beforeend', `<div class="legend">${legend(plot)}</div>` +
        '<div class="chart"><div class="tip" hidden></div></div>');
    plot.host = node.querySelector('.chart');
    plot.tip = node.querySelector('.tip');
    plot.number = number;
    for (const entry of plot.entries) drawnPoints += entry.curve.y.length;
    listen(plot);
});
const mixtures = runs.filter(run => run.routers),
    heatMaps = mixtures.map((run, i) => loads(run, i === 0));
memory();

function drawAll() {
    for (const plot of shownPlots) draw(plot);
    for (const drawLoads of heatMaps) drawLoads();
    document.getElementById('reset').disabled = !view;
}
function zoomTo(range) {
    view = range;
    for (const plot of shownPlots) leave(plot);
    drawAll();
}

document.getElementById('tools').hidden = false;
document.getElementById('reset').addEventListener('click', () => zoomTo(null));
for (const button of document.querySelectorAll('[data-axis]')) {
    const needed = {step: true, tokens: runs.every(run => run.curves.tokens),
        hours: runs.every(run => run.curves.seconds)};
    button.hidden = !needed[button.dataset.axis];
    if (button.dataset.axis === 'hours') button.textContent = unitOfTime.name;
    button.addEventListener('click', () => {
        axis = button.dataset.axis;
        for (const other of document.querySelectorAll('[data-axis]'))
            other.setAttribute('aria-pressed', other === button);
        zoomTo(null);
    });
}
if (several) runs.forEach((run, r) => {
    const button = document.createElement('button');
    button.innerHTML = `<i class="swatch c${r}"></i>${escaped(run.name)}`;
    button.setAttribute('aria-pressed', true);
    button.addEventListener('click', () => {
        run.shown = !run.shown;
        button.setAttribute('aria-pressed', run.shown);
        drawAll();
    });
    document.getElementById('runs').append(button);
});
document.getElementById('drawn').textContent =
    `The plots have ${grouped(drawnPoints)} points: the smallest and largest value of every ` +
    'pixel, so that no spike is missing.';

// ---- A live page --------------------------------------------------------------------------------

// A page that `train_gpt report --live` serves loads itself again when the runs have gone on,
// unless somebody is reading a plot.
if ('live' in document.body.dataset) {
    const kept = JSON.parse(sessionStorage.getItem('kept') ?? 'null'),
        kind = document.querySelector('.kind'), said = kind.textContent;
    const names = runs.map(run => run.name).join();
    if (kept?.names === names) {
        if (kept.axis !== 'step') document.querySelector(`[data-axis=${kept.axis}]`).click();
        // Minutes become hours in a long run.
        if (kept.axis !== 'hours' || kept.unit === unitOfTime.name) view = kept.view;
        for (const r of kept.hidden) document.querySelectorAll('#runs button')[r]?.click();
    }
    setInterval(async () => {
        if (document.hidden) return;
        try {
            const answer = await fetch('data');
            if (!answer.ok) return void (kind.textContent = said + ': ' + await answer.text());
            const now = await answer.json(), more = now.stamp !== stamp;
            const reading = document.querySelector('.chart:hover') !== null;
            kind.textContent = said +
                (more && reading ? ': new steps are there; move the pointer away to see them' : '');
            if (!more || reading) return;
            sessionStorage.setItem('kept', JSON.stringify({names, axis, view, unit: unitOfTime.name,
                hidden: [...runs.keys()].filter(r => !runs[r].shown)}));
            location.reload();
        } catch (error) {
            kind.textContent = said +
                ': nothing comes any more, since train_gpt report --live has ended';
        }
    }, 4000);
}

let width = 0;
new ResizeObserver(() => {
    if (document.documentElement.clientWidth !== width) {
        width = document.documentElement.clientWidth;
        drawAll();
    }
}).observe(document.body);
drawAll();
