// EXIF orientation of a picture file. Browsers turn pictures by it whatever createImageBitmap is told.

/** The file, or a copy that no browser turns: the orientation that its EXIF states becomes 1, as it lies. */
export async function withOrientation(file, turned) {
  if (turned) return file;
  const bytes = new Uint8Array(await file.arrayBuffer());
  const view = new DataView(bytes.buffer);
  for (let i = 8; i + 10 < bytes.length; i++) { // TIFF data, which begin with II*\0 or MM\0*, right after the name EXIF
    const little = bytes[i] === 0x49;
    if ((!little && bytes[i] !== 0x4d) || bytes[i + 1] !== bytes[i] || view.getUint16(i + 2, little) !== 42) continue;
    if (!/exif/i.test(String.fromCharCode(...bytes.subarray(i - 8, i)))) continue;
    const start = i + view.getUint32(i + 4, little);
    const end = start + 2 <= bytes.length ? start + 2 + 12 * view.getUint16(start, little) : 0;
    for (let at = start + 2; at + 12 <= Math.min(end, bytes.length); at += 12) {
      if (view.getUint16(at, little) === 0x0112) view.setUint16(at + 8, 1, little);
    }
    break;
  }
  return new Blob([bytes], { type: file.type });
}
