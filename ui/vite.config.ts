import preact from "@preact/preset-vite";
import { defineConfig } from "vitest/config";

// The built files are part of the Python package. They are committed; `make test-ui`
// compares them with a new build.
export default defineConfig({
  plugins: [preact()],
  build: {
    outDir: "../src/unbroken/cli/page/built",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
  },
  test: {
    environment: "jsdom",
    include: ["tests/**/*.test.{ts,tsx}"],
    // No test depends on how fast the machine is.
    testTimeout: 120_000,
    setupFiles: ["tests/setup.ts"],
    // One process for all: it takes longer to start another one than to run a file.
    pool: "threads",
    poolOptions: { threads: { singleThread: true } },
    isolate: false,
  },
});
