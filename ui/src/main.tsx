import { render } from "preact";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { App } from "./app";
import { keepKey } from "./orders";

keepKey();
const place = document.getElementById("page");
if (place) render(<App />, place);
