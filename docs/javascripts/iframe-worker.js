// Where the site is opened from a disk, a browser starts no worker, in which the search would run: it runs in a hidden
// frame instead, which is given the worker's messages. On a server this does nothing. (Its name, which the theme looks
// for, and the global `IFrameWorker`, which the search looks for, are theirs.)
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.worker = this;
      this.frame.srcdoc =
        "<script>postMessage = (data) => frameElement.worker.dispatchEvent(new MessageEvent('message', { data }));" +
        `</scr` + `ipt><script src="${new URL(url, document.baseURI)}"></scr` + `ipt>`;
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  }
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
