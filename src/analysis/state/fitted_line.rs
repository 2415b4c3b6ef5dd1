//! A line through points by least squares.

/// A least-squares line.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct FittedLine {
    /// The slope, in bytes per step.
    pub(crate) slope: f64,
    /// The coefficient of determination: 1 for points on a line.
    pub(crate) r2: f64,
}

/// Fits a line to points. Returns the default line for fewer than two different x values.
pub(crate) fn fit(points: &[(f64, f64)]) -> FittedLine {
    let n = points.len() as f64;
    if points.len() < 2 {
        return FittedLine::default();
    }
    let mean_x = points.iter().map(|point| point.0).sum::<f64>() / n;
    let mean_y = points.iter().map(|point| point.1).sum::<f64>() / n;
    let (mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0);
    for (x, y) in points {
        xx += (x - mean_x) * (x - mean_x);
        xy += (x - mean_x) * (y - mean_y);
        yy += (y - mean_y) * (y - mean_y);
    }
    if xx == 0.0 {
        return FittedLine::default();
    }
    let slope = xy / xx;
    let r2 = if yy == 0.0 { 1.0 } else { xy * xy / (xx * yy) };
    FittedLine { slope, r2 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaks_fit_a_line_to_points_on_a_line_exactly() {
        let points: Vec<(f64, f64)> = (0..10).map(|x| (f64::from(x), f64::from(3 * x + 1))).collect();
        let line = fit(&points);
        assert!((line.slope - 3.0).abs() < 1e-9 && (line.r2 - 1.0).abs() < 1e-9);
        assert_eq!(fit(&[(1.0, 1.0)]), FittedLine::default());
    }
}
