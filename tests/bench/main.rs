//! Tests of the arithmetic of benches/gateways, which would otherwise only fail after hours of
//! samples, and of the tool behind `make test`.

#![expect(unreachable_pub, reason = "a test binary exports nothing, and plain `pub` reads better")]

#[cfg(test)]
#[path = "../../benches/gateways/chart.rs"]
mod chart;
#[cfg(test)]
mod durations;
#[cfg(test)]
#[path = "../../benches/gateways/figures.rs"]
mod figures;
#[cfg(test)]
#[path = "../../benches/gateways/measurement.rs"]
mod measurement;
#[cfg(test)]
#[path = "../../benches/gateways/outcome.rs"]
mod outcome;
#[cfg(test)]
#[path = "../../benches/common/page.rs"]
mod page;
#[cfg(test)]
#[path = "../../benches/gateways/rows.rs"]
mod rows;
#[cfg(test)]
mod tests;
