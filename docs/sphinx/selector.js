// Adds links to the list of versions: the same page of each version, or the front page of a version that lacks it. The list is
// versions.js, one folder above each version's, so that pages of an old version also link to newer ones. It is a script
// because a page that is opened as a file may not read other files. Without the list nothing is added.
(function () {
  const box = document.querySelector("details.versions");
  const root = document.documentElement.dataset.content_root + "../";
  for (const version of box ? window.shoalVersions || [] : []) {
    const link = document.createElement("a");
    const page = version.pages.includes(box.dataset.page) ? box.dataset.page : "index.html";
    link.href = root + version.folder + "/" + page;
    link.textContent = version.title;
    if (version.folder === box.dataset.folder) {
      link.setAttribute("aria-current", "true");
    }
    const item = document.createElement("li");
    item.append(link);
    box.querySelector("ul").append(item);
  }
})();
