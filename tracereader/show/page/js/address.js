// The part of the address after # keeps the state of the page, so that it can be sent: #step=3&kernel=…

const address = {
  get(name) {
    return new URLSearchParams(location.hash.slice(1)).get(name);
  },
  all(name) {
    return new URLSearchParams(location.hash.slice(1)).getAll(name);
  },
  // Changes some of the state; null removes a name.
  set(changes) {
    const words = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") words.delete(name);
      else words.set(name, value);
    }
    try {
      history.replaceState(null, "", `#${words}`);
    } catch {
      // A page inside another one may not change its address.
    }
  },
};
