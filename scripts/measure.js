// Measures what a browser shows, for scripts/check_docs.py. The file is one expression, an object:
// `picture()` measures the SVG document in the tab, `page(pictures, limits)` the HTML document with
// what `picture()` returned for each of its pictures, by address.
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const CLEAR = [0, 0, 0, 0];

  // A CSS colour as [red, green, blue, alpha]: bytes, and a number from 0 to 1.
  const rgba = (css) => {
    if (!known.has(css)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = "rgba(0, 0, 0, 0)";
      canvas.fillStyle = css;
      canvas.fillRect(0, 0, 1, 1);
      const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(css, [red, green, blue, alpha / 255]);
    }
    return known.get(css);
  };

  const over = (top, below) => {
    const alpha = top[3] + below[3] * (1 - top[3]);
    if (!alpha) return CLEAR;
    const mix = (i) => (top[i] * top[3] + below[i] * below[3] * (1 - top[3])) / alpha;
    return [mix(0), mix(1), mix(2), alpha];
  };

  const faded = (colour, alpha) => [...colour.slice(0, 3), colour[3] * alpha];

  // The contrast of two opaque colours (WCAG 2.2, "contrast ratio"): 1 to 21.
  const contrast = (one, other) => {
    const light = (colour) => {
      const [r, g, b] = colour.slice(0, 3).map((byte) => {
        const part = byte / 255;
        return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
      });
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };

  const words = (text) => text.replace(/\s+/g, " ").trim().slice(0, 40);
  const isDrawn = (element) => element instanceof SVGElement && element.closest("svg");

  // Large text needs less contrast (WCAG 2.2, "large scale").
  const isLarge = (style, size) => size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);

  const layers = new Map();
  const layer = (element) => {
    if (!layers.has(element)) {
      const style = getComputedStyle(element);
      layers.set(element, { colour: rgba(style.backgroundColor), opacity: Number(style.opacity) });
    }
    return layers.get(element);
  };

  // The visible colour of what is drawn with a colour inside an element of HTML.
  const seen = (colour, element) => {
    let found = colour;
    for (let each = element; each; each = each.parentElement)
      found = faded(over(found, layer(each).colour), layer(each).opacity);
    return over(found, rgba("Canvas"));
  };

  // The opacity of a part of an SVG document.
  const opacity = (element) => {
    let found = 1;
    for (let each = element; each; each = each.parentElement) found *= layer(each).opacity;
    return found;
  };

  // The colour drawn in an SVG behind a point of a text; transparent where nothing is drawn.
  // The point is that of the document: the window of a large picture is scrolled there.
  const drawnBehind = (text, x, y) => {
    const inside = (at, start, length) => at >= start && at < start + length;
    if (!inside(x, scrollX, innerWidth) || !inside(y, scrollY, innerHeight))
      scrollTo(x - innerWidth / 2, y - innerHeight / 2);
    let found = CLEAR;
    for (const each of document.elementsFromPoint(x - scrollX, y - scrollY)) {
      if (!(each instanceof SVGGeometryElement) || each.closest("text") || found[3] === 1) continue;
      const style = getComputedStyle(each);
      const behind = each.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING;
      if (behind && style.fill !== "none")
        found = over(found, faded(rgba(style.fill), style.fillOpacity * opacity(each)));
    }
    return found;
  };

  const textsBelow = (root) => {
    const found = [];
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      if (!element || !walker.currentNode.data.trim()) continue;
      if (element.closest("script, style, noscript, template, title, desc, defs")) continue;
      if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
      const range = document.createRange();
      range.selectNodeContents(walker.currentNode);
      const box = range.getBoundingClientRect();
      if (box.width > 1 && box.height > 1) found.push([walker.currentNode.data, element, box]);
    }
    return found;
  };

  // The height of letters in pixels, after the transformations of an SVG.
  const sizeOf = (element, style) => {
    const size = parseFloat(style.fontSize);
    if (!isDrawn(element)) return size;
    const matrix = element.getScreenCTM();
    return size * Math.sqrt(Math.abs(matrix.a * matrix.d - matrix.b * matrix.c));
  };

  const picture = () => {
    scrollTo(0, 0);
    const outer = document.documentElement.getBoundingClientRect();
    const texts = textsBelow(document.documentElement).map(([text, element, box]) => {
      const style = getComputedStyle(element);
      const size = sizeOf(element, style);
      const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
      return {
        text: words(text), size, large: isLarge(style, size),
        ink: faded(rgba(style.fill), style.fillOpacity * opacity(element)),
        behind: drawnBehind(element, x, y),
        box: [box.left, box.top, box.right, box.bottom],
      };
    });
    const cut = texts.filter(({ box: [left, top, right, bottom] }) =>
      left < outer.left - 1 || top < outer.top - 1 ||
      right > outer.right + 1 || bottom > outer.bottom + 1);
    // The box of a text is higher than its letters: a quarter of it may overlap.
    const overlap = ([l, t, r, b], [L, T, R, B]) =>
      Math.min(r, R) - Math.max(l, L) > 2 &&
      Math.min(b, B) - Math.max(t, T) > 0.25 * Math.min(b - t, B - T);
    const overlaps = [];
    texts.forEach((one, i) => texts.slice(i + 1).forEach((other) => {
      if (overlap(one.box, other.box)) overlaps.push([one.text, other.text]);
    }));
    return {
      width: outer.width, height: outer.height, texts,
      cut: cut.map((each) => each.text), overlaps,
    };
  };

  // How the next element that does not let its content overflow treats it: "auto", "hidden", ...
  const overflow = (element) => {
    for (let each = element; each && each !== document.body; each = each.parentElement)
      if (getComputedStyle(each).overflowX !== "visible") return getComputedStyle(each).overflowX;
    return "visible";
  };

  const nameOf = (element) => {
    const outer = element.parentElement;
    const one = (each) => [each.localName, ...each.classList].slice(0, 2).join(".");
    return outer && outer !== document.body ? `${one(outer)} ${one(element)}` : one(element);
  };

  // The elements that must not scroll sideways: the document, and what scrolls its heading.
  const pageParts = () => {
    const found = [document.documentElement];
    for (let each = document.querySelector("h1"); each; each = each.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(each).overflowX)) found.push(each);
    return found;
  };

  const page = (pictures, limits) => {
    const small = new Map();
    const faint = new Map();
    // Several texts with the same fault make one entry, which names the worst of them.
    const note = (found, key, value) => {
      const old = found.get(key);
      const worst = old && (old.size ?? old.ratio) <= (value.size ?? value.ratio) ? old : value;
      found.set(key, { ...worst, count: (old?.count ?? 0) + 1 });
    };
    const cut = [];
    for (const [text, element, box] of textsBelow(document.body)) {
      const style = getComputedStyle(element);
      const size = sizeOf(element, style);
      const where = nameOf(element);
      if (size < limits.size - 0.01)
        note(small, `${where} ${size}`, { text: words(text), where, size });
      const colour = rgba(isDrawn(element) ? style.fill : style.color);
      const back = seen(CLEAR, element);
      const ratio = contrast(seen(colour, element), back);
      if (ratio < (isLarge(style, size) ? limits.large : limits.contrast) - 0.01)
        note(faint, `${where} ${colour} ${back}`, { text: words(text), where, ratio });
      if (box.left >= 0 && box.left < innerWidth && box.right > innerWidth + 1 &&
          ["hidden", "clip"].includes(overflow(element)))
        cut.push(words(text));
    }
    const shown = [...document.querySelectorAll("img, object")].filter((each) => each.offsetParent);
    const tiny = [];
    for (const each of shown) {
      const address = each.currentSrc || each.src || each.data;
      const box = each.getBoundingClientRect();
      const name = address.split("/").pop();
      if (box.width < limits.picture) tiny.push(address);
      const known = pictures[address];
      if (!known) continue;
      const scale = Math.min(box.width / known.width, box.height / known.height);
      const link = each.closest("a")?.href.split("#")[0] === address;
      for (const { text, size, large, ink, behind } of known.texts) {
        if (size * scale < limits.size - 0.01 && !link)
          note(small, `${name} shown`, { text, where: name, size: size * scale });
        else if (size * scale < limits.size - 0.01 && size < limits.size - 0.01)
          note(small, `${name} opened`, { text, where: `${name}, opened`, size });
        const under = seen(behind, each);
        const ratio = contrast(seen(over(ink, behind), each), under);
        if (ratio < (large ? limits.large : limits.contrast) - 0.01)
          note(faint, `${name} ${ink} ${under}`, { text, where: name, ratio });
      }
    }
    return {
      title: document.querySelector("h1")?.innerText ?? "",
      text: (document.querySelector("article") ?? document.body).innerText.length,
      styled: getComputedStyle(document.body).fontFamily.includes("sans-serif"),
      broken: [...document.images].filter((i) => !i.complete || !i.naturalWidth).map((i) => i.src),
      tiny,
      over: Math.max(...pageParts().map((each) => each.scrollWidth - each.clientWidth)),
      small: [...small.values()],
      faint: [...faint.values()],
      cut,
    };
  };

  return { picture, page };
})()
