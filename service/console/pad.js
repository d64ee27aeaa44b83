// The picture that a model of this shape sees, to draw on: by mouse, touch and keyboard.

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

export class Pad {
  /** `changed` is called when a stroke, a key or a command has changed the picture; `say` with words for listeners. */
  constructor(canvas, cursor, { changed, say }) {
    Object.assign(this, { canvas, cursor, changed, say, x: 0, y: 0, erasing: false, ink: [255, 255, 255] });
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.fit(8, 8);
    canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    canvas.addEventListener("pointermove", (event) => this.#follow(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => this.#end());
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  fit(width, height) {
    Object.assign(this, { width, height, x: width >> 1, y: height >> 1 });
    Object.assign(this.canvas, { width, height });
    this.radius = Math.max(0.45, 0.04 * Math.max(width, height));
    this.step = Math.max(1, Math.round(Math.max(width, height) / 32));
    this.canvas.parentElement.style.aspectRatio = `${width} / ${height}`;
    this.canvas.parentElement.dataset.grid = String(Math.max(width, height) <= 16);
    this.canvas.parentElement.style.setProperty("--cell", `${100 / width}% ${100 / height}%`);
    this.clear();
    this.#place();
  }

  clear() {
    this.context.fillStyle = "#000";
    this.context.fillRect(0, 0, this.width, this.height);
  }

  /** A picture, squeezed to the model's shape as the server does it. */
  show(picture) {
    this.clear();
    this.context.imageSmoothingQuality = "high";
    this.context.drawImage(picture, 0, 0, this.width, this.height);
  }

  /** pixel(x, y) -> [red, green, blue] */
  fill(pixel) {
    const image = this.context.createImageData(this.width, this.height);
    for (let i = 0; i < this.width * this.height; i += 1) {
      image.data.set([...pixel(i % this.width, Math.floor(i / this.width)), 255], 4 * i);
    }
    this.context.putImageData(image, 0, 0);
  }

  base64() {
    return this.canvas.toDataURL("image/png").split(",")[1];
  }

  /** A soft round brush around (x, y), in pixels: full within its radius, fading over one pixel more. */
  #paint(x, y) {
    const reach = Math.ceil(this.radius + 1);
    const left = clamp(Math.floor(x) - reach, 0, this.width - 1), top = clamp(Math.floor(y) - reach, 0, this.height - 1);
    const wide = Math.min(2 * reach + 1, this.width - left), high = Math.min(2 * reach + 1, this.height - top);
    const image = this.context.getImageData(left, top, wide, high);
    for (let i = 0; i < wide * high; i += 1) {
      const away = Math.hypot(left + (i % wide) + 0.5 - x, top + Math.floor(i / wide) + 0.5 - y);
      const share = clamp(1 - (away - this.radius) / 0.9, 0, 1);
      for (let c = 0; c < 3; c += 1) {
        const now = image.data[4 * i + c], full = this.erasing ? 0 : this.ink[c];
        const mixed = now + share * (full - now);
        image.data[4 * i + c] = this.erasing || full < now ? mixed : Math.max(now, share * full);
      }
    }
    this.context.putImageData(image, left, top);
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    return [(this.width * (event.clientX - box.left)) / box.width, (this.height * (event.clientY - box.top)) / box.height];
  }

  #begin(event) {
    if (event.button) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.last = this.#point(event);
    this.#paint(...this.last);
  }

  #follow(event) {
    if (!this.last) return;
    const [x, y] = this.#point(event), [fromX, fromY] = this.last;
    const steps = Math.ceil(Math.hypot(x - fromX, y - fromY) / 0.25);
    for (let i = 1; i <= steps; i += 1) this.#paint(fromX + ((x - fromX) * i) / steps, fromY + ((y - fromY) * i) / steps);
    this.last = [x, y];
  }

  #end() {
    if (this.last) this.changed();
    this.last = null;
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (move) {
      this.x = clamp(this.x + this.step * move[0], 0, this.width - 1);
      this.y = clamp(this.y + this.step * move[1], 0, this.height - 1);
      this.#place();
      if (event.shiftKey) this.#stamp();
      else this.say(`Column ${this.x + 1}, row ${this.y + 1}`);
    } else if (event.key === " " || event.key === "Enter") {
      this.#stamp();
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.clear();
      this.say("Cleared");
      this.changed({ cleared: true });
    } else if (event.key.toLowerCase() === "e") {
      this.toggle();
    } else {
      return;
    }
    event.preventDefault();
  }

  toggle() {
    this.erasing = !this.erasing;
    this.say(this.erasing ? "Erasing" : "Painting");
    this.canvas.dispatchEvent(new CustomEvent("mode"));
  }

  #stamp() {
    this.#paint(this.x + 0.5, this.y + 0.5);
    this.say(`${this.erasing ? "Erased" : "Painted"} column ${this.x + 1}, row ${this.y + 1}`);
    this.changed();
  }

  #place() {
    Object.assign(this.cursor.style, {
      left: `${(100 * this.x) / this.width}%`, top: `${(100 * this.y) / this.height}%`,
      width: `${100 / this.width}%`, height: `${100 / this.height}%`,
    });
  }
}
