// What the page shows is kept behind the # of its address, so that it can be sent: #step=3&kernel=…

const address = {
  get(name) {
    return new URLSearchParams(location.hash.slice(1)).get(name);
  },
  all(name) {
    return new URLSearchParams(location.hash.slice(1)).getAll(name);
  },
  // Changes some of it; null takes a name away.
  set(changes) {
    const words = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") words.delete(name);
      else words.set(name, value);
    }
    try {
      history.replaceState(null, "", `#${words}`);
    } catch {
      // A page inside another one may not: the address stays as it is.
    }
  },
};
