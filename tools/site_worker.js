// What: lets the search run where a page is opened from a file, in which browsers refuse workers.
// Why: the site must answer without a server and without a script from elsewhere.
// Never: touches a page that a server sent.
(() => {
  if (location.protocol !== "file:") return;
  // Runs a worker's script in a hidden frame of the same origin; messages are cloned by being posted.
  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.ready = new Promise((resolve) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        frame.srcdoc = `<!doctype html><script src="${new URL(url, location.href)}"></script>`;
        frame.onload = () => resolve(frame.contentWindow);
        document.body.appendChild(frame);
        this.frame = frame;
      });
      this.ready.then((inside) => {
        inside.postMessage = (data) => {
          const event = new MessageEvent("message", { data });
          this.dispatchEvent(event);
          if (this.onmessage) this.onmessage(event);
        };
      });
    }
    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  }
  window.IFrameWorker = FrameWorker; // the worker's script looks for this name in its parent
  window.Worker = FrameWorker;
})();
