// Which pages a search finds. Sphinx wants a page to have every word of the query, and knows
// keywords as phrases only. Here a page counts each word that it has: most among its keywords (the
// `{index} !` at its top), then in its titles, then in its text; more if few pages have it there.
if (typeof Search !== "undefined") {
  const EMPTY = `about against am an best can could did do does e explain explained from get had has
    have how i instead its made make many me much my need our should so some tell than them us use
    using versus vs want we what when where which who whose why without would you your`;
  stopwords.push(...EMPTY.split(/\s+/));

  // "what is a router" asks for the glossary's "router".
  const parse = Search._parseQuery;
  Search._parseQuery = (query) => parse(query.trim().replace(/^what (is|are) (an? |the )?/i, ""));

  Search.performTermsSearch = (words) => {
    const { docnames, titles, filenames, terms, titleterms } = Search._index;
    const places = [[keywords(), 25], [titleterms, Scorer.title], [terms, Scorer.term]];
    const scores = new Map();
    for (const word of [...words].flatMap((one) => meant(one, places))) {
      for (const [pages, weight] of places) {
        const having = Object.hasOwn(pages, word) ? [pages[word]].flat() : [];
        const rarity = 1 - Math.log(having.length) / Math.log(docnames.length);
        for (const page of having) {
          scores.set(page, (scores.get(page) ?? 0) + weight * rarity);
        }
      }
    }
    return [...scores].map(([page, score]) => [
      docnames[page], titles[page], "", null, score, filenames[page],
    ]);
  };

  // Where no page has a word, those that begin with it: "dedup" asks for "deduplicate".
  function meant(word, places) {
    const every = places.flatMap(([pages]) => Object.keys(pages));
    if (every.includes(word) || word.length < 3) return [word];
    return [...new Set(every)].filter((one) => one.startsWith(word));
  }

  // Each word of the keywords, and the pages that have it among them.
  function keywords() {
    const stemmer = new Stemmer();
    const pages = {};
    for (const [entry, places] of Object.entries(Search._index.indexentries)) {
      const having = places.filter(([, id]) => id.startsWith("index-")).map(([page]) => page);
      if (!having.length) continue;
      for (const word of splitQuery(entry).map((one) => stemmer.stemWord(one))) {
        pages[word] = [...new Set([...(pages[word] ?? []), ...having])];
      }
    }
    return pages;
  }
}
