// What the build of Apache ECharts contains: `make echarts` makes echarts.min.js of it.
export {color, init} from "echarts/core";
import {use} from "echarts/core";
import {CustomChart, LineChart, ParallelChart, ScatterChart} from "echarts/charts";
import {
  DataZoomInsideComponent, GridComponent, LegendScrollComponent, MarkLineComponent, ParallelComponent, ToolboxComponent,
  TooltipComponent, VisualMapContinuousComponent,
} from "echarts/components";
import {LabelLayout} from "echarts/features";
import {CanvasRenderer} from "echarts/renderers";

use([
  CustomChart, LineChart, ParallelChart, ScatterChart, DataZoomInsideComponent, GridComponent, LegendScrollComponent,
  MarkLineComponent, ParallelComponent, ToolboxComponent, TooltipComponent, VisualMapContinuousComponent, LabelLayout,
  CanvasRenderer,
]);
